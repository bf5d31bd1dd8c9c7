"""One suite for each port: inherit it in a test class and provide the fixtures that it names."""
