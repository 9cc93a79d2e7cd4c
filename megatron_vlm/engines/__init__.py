"""Engines that run next to the trainer: they draw answers and score rows.

engine = await engine_for(cfg.engine, EngineSettings("python", "folder"))
samples = await engine.sample(row, SamplingSettings(max_tokens=64), seeds=[0, 1, 2, 3])
await engine.update(worker.named_weights(), version=1)
"""
