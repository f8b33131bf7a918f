"""Even chunks: documents are encoded in chunks of equal length, which are joined into one position-fair vector."""
