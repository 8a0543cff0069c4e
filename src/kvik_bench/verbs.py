"""The commands that measure, for the command line of kvik. Imports nothing, to keep `kvik --help`
fast."""

# command -> (its module, its help text)
VERBS = {
    "compare": ("kvik_bench.cli.compare", "models and formats: size, quality and speed"),
    "spec-report": ("kvik_bench.inprocess.speculation", "measure the gain from speculation here"),
    "calibrate": ("kvik_bench.cli.calibrate", "measure what this machine can do"),
    "simulate": ("kvik_bench.cli.simulate", "simulate a load on replicas, without a model"),
    "bench latency": ("kvik_bench.inprocess.latency", "time one batch at a time"),
    "bench throughput": ("kvik_bench.inprocess.throughput", "tokens a second of many requests"),
    "bench serve": ("kvik_bench.cli.serve", "load a server, given by its URL"),
    "bench startup": ("kvik_bench.inprocess.startup", "seconds to the first token, by part"),
    "bench batching": ("kvik_bench.inprocess.batching", "static, dynamic and continuous batching"),
    "bench compare": ("kvik_bench.peers.compare", "kvik and other engines side by side"),
    "bench attention": (
        "kvik_bench.inprocess.attention",
        "time a prompt's attention in tiles and with all scores",
    ),
    "bench techniques": ("kvik_bench.inprocess.techniques", "measure the gain of each technique"),
}
