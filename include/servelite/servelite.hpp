// servelite.hpp: everything but pictures. Include this, or only the rooms you need.
// The order below is the order to read them in.
#pragma once

#include "error.hpp"
#include "dtype.hpp"
#include "simd.hpp"
#include "kernels.hpp"
#include "machine.hpp"
#include "gguf.hpp"
#include "tokenizer.hpp"
#include "model.hpp"
#include "block_pool.hpp"
#include "prefix_cache.hpp"
#include "step_batch.hpp"
#include "transformer.hpp"
#include "sampler.hpp"
#include "request.hpp"
#include "static_batcher.hpp"
#include "continuous_batcher.hpp"
#include "workload.hpp"
#include "metrics.hpp"
#include "serve.hpp"
