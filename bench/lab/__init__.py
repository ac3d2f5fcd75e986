"""The lab: an S3 store of our own whose every request is counted, shaped and, on demand, spoiled."""
