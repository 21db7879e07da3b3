"""Apache Spark: the Java that it needs, sessions with it, and a cluster on this machine."""
