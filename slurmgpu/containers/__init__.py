"""Apptainer: images, the command that runs a worker in one, and its complaints in words. Nothing else knows it."""
