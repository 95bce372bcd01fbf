"""Client of servers with OpenAI's API over HTTP: calls them and checks their answers. Knows neither the fleet nor clients."""
