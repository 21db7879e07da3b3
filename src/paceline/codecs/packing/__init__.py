"""Numbers into bytes and back: what several codecs share."""
