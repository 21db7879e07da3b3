"""Convert a large or dirty table to shards, with Spark or Polars and the same result."""
