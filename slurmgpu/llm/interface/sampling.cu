// Draw tokens by the Gumbel-max trick, as sampling.py does by operations of PyTorch: see there for what is drawn, and
// noise.py for the random numbers. A row's result does not depend on the other rows: the greatest of numbers is the same
// in any order, and sums are those of a row's parts, each in one order.
//
// LOGIT_BITS is 32 for logits in float, 16 for bfloat16. Blocks have PART_THREADS or ROW_THREADS threads; kernels are
// compiled for as many, else they might take more registers than there are for them, and could not be launched.

typedef unsigned long long U64;
#if LOGIT_BITS == 16
typedef unsigned short Logit;
__device__ float number_of(Logit logit) { return __uint_as_float((unsigned)logit << 16); }
#else
typedef float Logit;
__device__ float number_of(Logit logit) { return logit; }
#endif

#define GOLDEN 0x9E3779B97F4A7C15ull
#define LEAST __uint_as_float(0xFF800000u)  // -inf
#define DIGITS 256
#define LANES 32
#define AT_ONCE 4

__device__ U64 splitmix(U64 number) {
  U64 z = number + GOLDEN;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ U64 stream_of(long long key, long long position) {
  return splitmix(splitmix((U64)key) + (U64)position * GOLDEN);
}

__device__ float gumbel(U64 stream, int token) {
  U64 number = splitmix(stream + (U64)(token + 1) * GOLDEN) >> 24;
  float u = fminf(((float)number + 0.5f) * 0x1p-40f, 0x1.fffffep-1f);
  return -logf(-log1pf(-u));
}

// Bits whose order is that of the numbers: -0 is 0, and NaN, of either sign, is the greatest, as for PyTorch.
__device__ unsigned ordered(float number) {
  unsigned bits = __float_as_uint(number + 0.0f);
  return number != number ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ float unordered(unsigned bits) { return __uint_as_float(bits >> 31 ? bits & 0x7FFFFFFFu : ~bits); }

// A score with its token: the greatest is the greatest score, and of equal ones the first token.
__device__ U64 packed(float score, int token) { return ((U64)ordered(score) << 32) | (0xFFFFFFFFu - (unsigned)token); }

__device__ int token_of(U64 best) { return (int)(0xFFFFFFFFu - (unsigned)best); }

// The greatest number of a block's threads, for all of them. They are a power of two.
__device__ U64 greatest(U64* shared, U64 mine) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int n = blockDim.x / 2; n > 0; n /= 2) {
    if (threadIdx.x < n && shared[threadIdx.x + n] > shared[threadIdx.x]) shared[threadIdx.x] = shared[threadIdx.x + n];
    __syncthreads();
  }
  U64 found = shared[0];
  __syncthreads();
  return found;
}

__device__ double sum(double* shared, double mine) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int n = blockDim.x / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) shared[threadIdx.x] += shared[threadIdx.x + n];
    __syncthreads();
  }
  double found = shared[0];
  __syncthreads();
  return found;
}

// Call `work` with tokens of a row and their logits: with every `step`-th from `first` on, several of which are read at
// once.
template <typename Work> __device__ void for_tokens(const Logit* logits, int n_tokens, int first, int step, Work work) {
  int token = first;
  for (; token + (AT_ONCE - 1) * step < n_tokens; token += AT_ONCE * step) {
    float read[AT_ONCE];
    for (int i = 0; i < AT_ONCE; ++i) read[i] = number_of(logits[token + i * step]);
    for (int i = 0; i < AT_ONCE; ++i) work(token + i * step, read[i]);
  }
  for (; token < n_tokens; token += step) work(token, number_of(logits[token]));
}

// By blocks (part, row): the best score of the part's tokens, packed, its greatest logit, in order, and where top_p needs
// it, the mass of its tokens beside that of the greatest: (row, part).
extern "C" __global__ __launch_bounds__(PART_THREADS)
void scan(const Logit* logits, int n_tokens, const float* temperatures, const long long* keys,
          const long long* positions, const long long* top_k, const float* top_p, U64* best,
          U64* most, double* masses) {
  __shared__ union {
    U64 numbers[PART_THREADS];
    double sums[PART_THREADS];
  } shared;
  int row = blockIdx.y, part = row * gridDim.x + blockIdx.x;
  int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  const Logit* mine = logits + (long long)row * n_tokens;
  float temperature = temperatures[row];
  U64 stream = stream_of(keys[row], positions[row]);
  U64 found = 0, top = 0;
  for_tokens(mine, n_tokens, first, step, [&](int token, float logit) {
    float score = temperature > 0 ? logit / temperature + gumbel(stream, token) : logit;
    U64 one = packed(score, token);
    if (one > found) found = one;
    if (ordered(logit) > top) top = ordered(logit);
  });
  found = greatest(shared.numbers, found);
  top = greatest(shared.numbers, top);
  double mass = 0;
  if (temperature > 0 && top_p[row] < 1 && top_k[row] == 0 && top > ordered(LEAST)) {
    float highest = unordered((unsigned)top) / temperature;
    for_tokens(mine, n_tokens, first, step,
               [&](int token, float logit) { mass += expf(logit / temperature - highest); });
    mass = sum(shared.sums, mass);
  }
  if (threadIdx.x == 0) best[part] = found, most[part] = top, masses[part] = mass;
}

// The bits, in order, of the k-th greatest logit of a row, 8 bits at a time; `left` gets how many of that value belong
// to the k greatest. Each lane of a warp counts for itself: most logits have the same first digits.
__device__ unsigned kth(int* counts, const Logit* logits, int n_tokens, int k, int* left) {
  __shared__ unsigned prefix;
  __shared__ int remaining;
  unsigned known = 0;
  if (threadIdx.x == 0) prefix = 0, remaining = k;
  for (int shift = 24; shift >= 32 - LOGIT_BITS; shift -= 8) {
    for (int i = threadIdx.x; i < DIGITS * LANES; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for_tokens(logits, n_tokens, threadIdx.x, ROW_THREADS, [&](int token, float logit) {
      unsigned bits = ordered(logit);
      if ((bits & known) == prefix) atomicAdd(&counts[((bits >> shift) & 255) * LANES + threadIdx.x % LANES], 1);
    });
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += blockDim.x) {
      int n = 0;
      // Threads begin at different lanes, since those of a warp would all read one bank of the memory.
      for (int lane = 0; lane < LANES; ++lane) n += counts[digit * LANES + (lane + digit) % LANES];
      counts[digit * LANES] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = DIGITS - 1;
      for (; digit > 0 && counts[digit * LANES] < remaining; --digit) remaining -= counts[digit * LANES];
      prefix |= (unsigned)digit << shift;
    }
    known |= 255u << shift;
    __syncthreads();
  }
  unsigned found = prefix;
#if LOGIT_BITS == 16
  if (!(found >> 31)) found |= 0xFFFF;  // the lower bits of a negative number, in order
#endif
  *left = remaining;
  __syncthreads();
  return found;
}

// By one block a row: its token, from what `scan` has found. A candidate that the rules exclude is followed by the best
// score among the tokens that they keep, or, as only a sum tells that top_p excludes it, of greater logits. Few logits
// are divided, and what is compared with others is a quotient, as it is for PyTorch.
extern "C" __global__ __launch_bounds__(ROW_THREADS)
void settle(const Logit* logits, int n_tokens, int n_parts, const float* temperatures,
            const long long* keys, const long long* positions, const long long* top_k,
            const float* top_p, const float* min_p, const U64* best, const U64* most,
            const double* masses, long long* tokens) {
  __shared__ union {
    int counts[DIGITS * LANES];
    U64 numbers[ROW_THREADS];
    double sums[ROW_THREADS];
  } shared;
  int row = blockIdx.x;
  const Logit* mine = logits + (long long)row * n_tokens;
  float temperature = temperatures[row];
  U64 found = 0, top = 0;
  for (int part = row * n_parts; part < (row + 1) * n_parts; ++part) {
    if (best[part] > found) found = best[part];
    if (most[part] > top) top = most[part];
  }
  if (temperature > 0) {
    U64 stream = stream_of(keys[row], positions[row]);
    float highest = unordered((unsigned)top) / temperature;
    float least = min_p[row] > 0 ? highest + logf(min_p[row]) : LEAST;
    bool is_nucleus = top_p[row] < 1;
    double limit = 0;  // the mass that top_p keeps
    if (top_k[row] > 0) {
      int n_last = 0;
      float last = LEAST;
      if (top_k[row] < n_tokens) last = unordered(kth(shared.counts, mine, n_tokens, (int)top_k[row], &n_last));
      least = fmaxf(least, last / temperature);
      if (is_nucleus) {
        for_tokens(mine, n_tokens, threadIdx.x, ROW_THREADS, [&](int token, float logit) {
          if (logit > last) limit += expf(logit / temperature - highest);
        });
        limit = top_p[row] * (sum(shared.sums, limit) + n_last * (double)expf(last / temperature - highest));
      }
    } else if (is_nucleus) {
      for (int part = row * n_parts; part < (row + 1) * n_parts; ++part)
        if (masses[part] > 0) limit += masses[part] * expf(unordered((unsigned)most[part]) / temperature - highest);
      limit *= top_p[row];
    }
    float bound = least * temperature;  // no smaller logit is kept, whatever its quotient rounds to
    bound -= fabsf(bound) * 1e-6f;
    while (true) {
      float own = number_of(mine[token_of(found)]), candidate = own / temperature;
      bool is_below = candidate < least;
      if (!is_below && !is_nucleus) break;
      U64 next = 0;
      double above = 0;
      for_tokens(mine, n_tokens, threadIdx.x, ROW_THREADS, [&](int token, float logit) {
        if (is_below ? logit < bound : !(logit > own)) return;
        float scaled = logit / temperature;
        if (!(scaled > candidate) || scaled < least) return;
        if (is_nucleus) above += expf(scaled - highest);
        U64 one = packed(scaled + gumbel(stream, token), token);
        if (one > next) next = one;
      });
      next = greatest(shared.numbers, next);
      if (!is_below) above = sum(shared.sums, above);
      if (next == 0 || !(is_below || (above >= limit && above > 0))) break;
      found = next;
    }
  }
  if (threadIdx.x == 0) tokens[row] = token_of(found);
}
