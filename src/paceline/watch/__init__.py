"""The live page of a run or a study: `paceline watch DIR`."""
