"""Apache Spark beside Paceline: the Java it needs, and a cluster of its own on this machine."""
