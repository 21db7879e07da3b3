"""Moving bytes between ranks. One file per way; metering is a wrapper around any of them."""
