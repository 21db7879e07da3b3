"""Moving bytes between ranks. One file or folder per way; metering is a wrapper around any
of them.
"""
