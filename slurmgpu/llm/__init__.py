"""Language models: engines, prompts, answers, and the size and placement of models without loading them.

`engines` opens one, `settings` checks what workloads set. May import: its folders and util; torch and transformers.
"""
