"""What computes a plan: request table, input batch, model runner, sampler."""
