"""From a model and example inputs to programs: the copy, the run that is compared to, the tracer, and the ladder over it."""
