"""Servers that speak OpenAI's API over HTTP: asked, and what they answer checked. Knows neither the fleet nor clients."""
