"""The lab: an S3 store for tests and benchmarks, which counts all requests, and can delay them and make them fail."""
