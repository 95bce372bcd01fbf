"""How many workers there should be: load is forecast, workers are planned. Knows neither routers nor who starts workers."""
