"""How all ranks combine a buffer: schedules as data, one executor."""
