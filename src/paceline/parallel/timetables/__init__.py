"""The timetables, one per file."""
