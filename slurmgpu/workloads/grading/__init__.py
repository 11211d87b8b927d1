"""Whether an answer is right: checkers, mathematical expressions compared, and programs of a model run in a sandbox."""
