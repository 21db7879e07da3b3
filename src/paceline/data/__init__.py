"""Where samples come from (sources), and which of them a worker sees (shards)."""
