"""OpenAI's files: uploaded, listed, read and forgotten. Knows no model and no worker."""
