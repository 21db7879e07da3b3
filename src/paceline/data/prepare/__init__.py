"""A table that is too large or too dirty, made into shards that trainers map: by Spark or by
Polars, with the same result.
"""
