"""Codecs encode messages in fewer bytes than float32 numbers take. One file each."""
