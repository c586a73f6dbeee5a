"""Real engines and real trainers: the demo, the benchmarks and the models they run on."""
