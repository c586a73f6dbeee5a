"""Real engines and real trainers: the demos, the benchmarks, and the models that they use."""
