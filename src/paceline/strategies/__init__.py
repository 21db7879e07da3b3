"""Ways of keeping the workers together. One file each."""
