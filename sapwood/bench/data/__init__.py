"""What is asked for: conversations, made up or read from files. Knows neither servers nor clocks."""
