"""The commands that measure, for the command line of kvik. Imports nothing, to keep `kvik --help`
fast."""

# command -> (its module, its help text)
VERBS = {
    "compare": ("kvik_bench.cli.compare", "compare models and formats: size, quality and speed"),
    "spec-report": ("kvik_bench.inprocess.speculation", "measure the gain from speculation here"),
    "calibrate": ("kvik_bench.cli.calibrate", "measure the speed of this machine, for predictions"),
    "simulate": ("kvik_bench.cli.simulate", "simulate a load on replicas, without a model"),
    "bench latency": ("kvik_bench.inprocess.latency", "time one batch at a time"),
    "bench throughput": ("kvik_bench.inprocess.throughput", "time many requests at once"),
    "bench serve": ("kvik_bench.cli.serve", "measure a server, given by its URL, under load"),
    "bench startup": ("kvik_bench.inprocess.startup", "time a start, to the first token"),
    "bench batching": (
        "kvik_bench.inprocess.batching",
        "time static, dynamic, continuous batching",
    ),
    "bench compare": ("kvik_bench.peers.compare", "measure kvik beside other engines"),
    "bench attention": (
        "kvik_bench.inprocess.attention",
        "time a prompt's attention in tiles and with all scores",
    ),
    "bench techniques": ("kvik_bench.inprocess.techniques", "measure the gain of each technique"),
}
