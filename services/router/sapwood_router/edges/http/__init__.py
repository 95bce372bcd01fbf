"""HTTP below the API: connections, requests, bodies, errors. Knows no model, no prompt and no worker."""
