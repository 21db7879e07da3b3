"""What travels instead of float32. One file each."""
