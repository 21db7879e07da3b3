"""Start the ranks of a job, end them, and write the record of the run."""
