"""`vitgraph bench`: the encoder against others, in one process, on the same weights and inputs."""
