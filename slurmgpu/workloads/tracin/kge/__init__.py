"""Knowledge-graph embeddings: their files, their models and their losses."""
