"""The verbs that measure, for the command line of kvik. Imports nothing: `kvik --help` reads it."""

# verb -> (its module, what it does)
VERBS = {
    "compare": ("kvik_bench.cli.compare", "models and formats: size, quality and speed"),
    "spec-report": ("kvik_bench.inprocess.speculation", "what guessing ahead gains a model here"),
    "calibrate": ("kvik_bench.cli.calibrate", "measure what this machine can do"),
    "simulate": ("kvik_bench.cli.simulate", "what replicas do with a load, computing nothing"),
    "bench latency": ("kvik_bench.inprocess.latency", "time one batch at a time"),
    "bench throughput": ("kvik_bench.inprocess.throughput", "tokens a second of many requests"),
    "bench serve": ("kvik_bench.cli.serve", "put a load on a server by its URL"),
    "bench startup": ("kvik_bench.inprocess.startup", "seconds to the first token, by part"),
    "bench batching": ("kvik_bench.inprocess.batching", "static, dynamic and continuous batching"),
    "bench compare": ("kvik_bench.peers.compare", "kvik beside other engines"),
    "bench attention": (
        "kvik_bench.inprocess.attention",
        "a prompt's attention without its matrix",
    ),
    "bench techniques": ("kvik_bench.inprocess.techniques", "what each technique brings"),
}
