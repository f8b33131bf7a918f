"""The other way to one position-fair vector: a document encoded in even chunks that are joined into one vector."""
