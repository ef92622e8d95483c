/* Products and Cholesky factors of many small matrices of doubles, on all cores.

A product works on tiles of ROWS × (WIDTH · LANES) numbers that stay in registers, from operands that were copied, panel
by panel, into the order in which tiles read them. Zeros at both ends of a panel are found on the way and skipped, so
that a product with a triangular matrix costs half, and one of two triangular matrices a third.

Every number is a sum over k in rising order, in blocks of DEPTH, whatever the batch, the number of columns and the
number of threads are: the same finite matrices give the same bits in any company. A zero times what is not finite may be
left out.

Matrices are given by a pointer and by what lies between two elements of the batch, two rows and two columns, counted in
numbers; a result has its columns side by side. Functions return 0, or 1 where there was not enough memory. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#endif

#if defined(__AVX512F__)
#define LANES 8
#define ROWS 8
#elif defined(__AVX__)
#define LANES 4
#define ROWS 4
#else
#define LANES 2
#define ROWS 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8") /* so that sums stay in registers */

enum {
  WIDTH = 3,
  COLUMNS = WIDTH * LANES,
  DEPTH = 384,
  CHUNK = 480,  /* columns that a task of a product takes at most, about */
  POINTS = 240, /* points that a task of a projection takes at most, about */
  GROUPS = 8,   /* sums over points that are made at once, each by a task of its own */
  BLOCK = 16    /* rows of a Cholesky factor at a time */
};

typedef double vec __attribute__((vector_size(8 * LANES)));
typedef double loose __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef int64_t bits __attribute__((vector_size(8 * LANES)));

static long least(long a, long b) { return a < b ? a : b; }
static long most(long a, long b) { return a > b ? a : b; }
static long up_to_multiple(long n, long of) { return (n + of - 1) / of * of; }

static pthread_key_t memory_of_thread;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void make_key(void) { pthread_key_create(&memory_of_thread, free); }

/* Memory of this thread, kept for the next call until the thread ends; NULL where there is none. */
static double *workspace(long numbers) {
  static _Thread_local double *memory;
  static _Thread_local long size;
  if (numbers > size) {
    pthread_once(&once, make_key);
    free(memory);
    memory = aligned_alloc(64, up_to_multiple(8 * numbers, 64));
    size = memory ? numbers : 0;
    pthread_setspecific(memory_of_thread, memory);
  }
  return memory;
}

typedef struct {
  const double *at;
  long row, column;
} Matrix;

/* What becomes of a product: times alpha, added to what is there or not; its lower triangle alone; exp(min(·, cap)) of
it; times weights, entry by entry; and the squared norms of its columns, over the first rows. */
typedef struct {
  double alpha;
  int adds, is_lower;
  const double *cap;
  Matrix weights;
  double *norms;
  long norm_rows;
} Finish;

/* LANES vectors of LANES numbers, each `step` after the one before, side by side: panel[p][i] = x[i][p]. */
static void transpose(const double *x, long step, double *panel, long width) {
#if LANES == 8
  const bits pairs[2] = {{0, 8, 2, 10, 4, 12, 6, 14}, {1, 9, 3, 11, 5, 13, 7, 15}};
  const bits fours[2] = {{0, 1, 8, 9, 4, 5, 12, 13}, {2, 3, 10, 11, 6, 7, 14, 15}};
  const bits eights[2] = {{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}};
#elif LANES == 4
  const bits pairs[2] = {{0, 4, 2, 6}, {1, 5, 3, 7}}, fours[2] = {{0, 1, 4, 5}, {2, 3, 6, 7}};
#else
  const bits pairs[2] = {{0, 2}, {1, 3}};
#endif
  vec row[LANES], other[LANES];
  for (int i = 0; i < LANES; i++) row[i] = *(const loose *)(x + i * step);
  for (int i = 0; i < LANES; i++) other[i] = __builtin_shuffle(row[i & ~1], row[i | 1], pairs[i & 1]);
  memcpy(row, other, sizeof row);
#if LANES >= 4
  for (int i = 0; i < LANES; i++) other[i] = __builtin_shuffle(row[i & ~2], row[i | 2], fours[i >> 1 & 1]);
  memcpy(row, other, sizeof row);
#endif
#if LANES >= 8
  for (int i = 0; i < LANES; i++) other[i] = __builtin_shuffle(row[i & ~4], row[i | 4], eights[i >> 2 & 1]);
  memcpy(row, other, sizeof row);
#endif
  for (int i = 0; i < LANES; i++) *(loose *)(panel + i * width) = row[i];
}

/* k numbers of each of `count` vectors side by side, number by number, with zeros up to `width` of them. */
static void pack(const double *x, long step, long next, long count, long k, long width, double *panel) {
  long done = count / LANES * LANES;
  if (step == 1) {
    for (long p = 0; p < k; p++)
      for (long i = 0; i < done; i += LANES) *(loose *)(panel + p * width + i) = *(const loose *)(x + p * next + i);
  } else if (next == 1) {
    long whole = k / LANES * LANES;
    for (long i = 0; i < done; i += LANES) {
      for (long p = 0; p < whole; p += LANES) transpose(x + i * step + p, step, panel + p * width + i, width);
      for (long p = whole; p < k; p++)
        for (long r = i; r < i + LANES; r++) panel[p * width + r] = x[r * step + p];
    }
  } else
    done = 0;
  for (long i = done; i < width; i++)
    for (long p = 0; p < k; p++) panel[p * width + i] = i < count ? x[i * step + p * next] : 0;
}

typedef struct {
  long first, last;
} Range;

static int is_zero(const double *x, long count) {
  int found = 0;
  for (long i = 0; i < count; i++) found |= x[i] != 0;
  return !found;
}

/* The k from which a panel has other numbers than zeros, and up to which. */
static Range nonzero(const double *panel, long k, long width) {
  Range range = {0, k};
  while (range.last > 0 && is_zero(panel + (range.last - 1) * width, width)) range.last--;
  while (range.first < range.last && is_zero(panel + range.first * width, width)) range.first++;
  return range;
}

/* α a b of two panels. */
INLINE void multiply(const int width, long k, const double *restrict a, const double *restrict b, double alpha,
                     double *restrict tile) {
  vec sum[ROWS][WIDTH];
  UNROLL for (int i = 0; i < ROWS; i++)
    UNROLL for (int w = 0; w < width; w++) sum[i][w] = (vec){0};
  for (long p = 0; p < k; p++, a += ROWS, b += width * LANES) {
    vec x[WIDTH];
    UNROLL for (int w = 0; w < width; w++) x[w] = *(const loose *)(b + w * LANES);
    UNROLL for (int i = 0; i < ROWS; i++)
      UNROLL for (int w = 0; w < width; w++) sum[i][w] += a[i] * x[w];
  }
  UNROLL for (int i = 0; i < ROWS; i++)
    UNROLL for (int w = 0; w < width; w++) *(vec *)(tile + i * COLUMNS + w * LANES) = alpha * sum[i][w];
}

static void multiply_panels(long width, long k, const double *a, const double *b, double alpha, double *tile) {
  if (width == 3 * LANES)
    multiply(3, k, a, b, alpha, tile);
  else if (width == 2 * LANES)
    multiply(2, k, a, b, alpha, tile);
  else
    multiply(1, k, a, b, alpha, tile);
}

static vec choose(bits where, vec yes, vec no) { return (vec)((where & (bits)yes) | (~where & (bits)no)); }

/* exp(x) = 2ⁿ exp(r) with |r| ≤ ½ log 2, of whose series 14 terms are enough. */
static vec exponential(vec x) {
  static const double inverse_factorials[] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
      1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  const double inverse_log2 = 0x1.71547652b82fep0, log2_high = 0x1.62e42feep-1, log2_low = 0x1.a39ef35793c76p-33;
  const double magic = 0x1.8p52; /* what is added to it is rounded to a whole number, in its last bits */
  vec shifted = x * inverse_log2 + magic, n = shifted - magic;
  vec r = (x - n * log2_high) - n * log2_low, series = (vec){0} + inverse_factorials[0];
  for (int i = 1; i < 14; i++) series = series * r + inverse_factorials[i];
  vec power = (vec)(((bits)shifted + 1023) << 52);
  vec result = choose(x < -708, (vec){0}, series * power);
  return choose(x > 709, (vec){0} + INFINITY, result);
}

static void exponentials(double *x, long count, double cap) {
  for (long i = 0; i < count; i += LANES) {
    vec value = *(loose *)(x + i), largest = (vec){0} + cap;
    *(loose *)(x + i) = exponential(choose(value > largest, largest, value));
  }
}

/* A tile of sums becomes rows i, …, i + rows − 1 of C, from column j on. */
INLINE void finish(double *x, const long rows, const long columns, long i, long j, double *C, long C_row, int adds,
                   int is_last, const Finish *how) {
  double *c = C + i * C_row + j;
  if (adds)
    for (long r = 0; r < rows; r++)
      for (long s = 0; s < columns; s++) x[r * COLUMNS + s] += c[r * C_row + s];
  if (is_last && how->cap) exponentials(x, ROWS * COLUMNS, *how->cap);
  if (is_last && how->weights.at)
    for (long r = 0; r < rows; r++)
      for (long s = 0; s < columns; s++) x[r * COLUMNS + s] *= how->weights.at[(i + r) * how->weights.row + j + s];
  if (is_last && how->norms)
    for (long r = 0; r < least(rows, how->norm_rows - i); r++)
      for (long s = 0; s < columns; s++) how->norms[j + s] += x[r * COLUMNS + s] * x[r * COLUMNS + s];
  if (how->is_lower && j + columns > i + 1)
    for (long r = 0; r < rows; r++)
      for (long s = most(0, i + r + 1 - j); s < columns; s++) x[r * COLUMNS + s] = 0;
  for (long r = 0; r < rows; r++) memcpy(c + r * C_row, x + r * COLUMNS, 8 * columns);
}

static long space_of_product(long m, long k) {
  return (up_to_multiple(m, ROWS) + COLUMNS) * least(k, DEPTH) + 2 * up_to_multiple(m, ROWS) + 8;
}

/* Columns j0 to j1 − 1 of C = A B, where A is m × K. */
static void multiply_matrices(
    long m, long K, long j0, long j1, Matrix A, Matrix B, double *C, long C_row, const Finish *how, double *space) {
  double tile[ROWS * COLUMNS] __attribute__((aligned(64)));
  space = (double *)up_to_multiple((long)space, 64); /* a vector that crosses a line of the cache takes twice as long */
  Range *ranges = (Range *)space;
  double *packed_A = space + 2 * up_to_multiple(m, ROWS), *packed_B = packed_A + up_to_multiple(m, ROWS) * least(K, DEPTH);
  if (how->norms) memset(how->norms + j0, 0, 8 * (j1 - j0));
  for (long from = 0; from == 0 || from < K; from += DEPTH) {
    long k = least(K - from, DEPTH);
    int adds = from > 0 || how->adds, is_last = from + k == K;
    for (long i = 0; i < m; i += ROWS) {
      pack(A.at + i * A.row + from * A.column, A.row, A.column, least(ROWS, m - i), k, ROWS, packed_A + i * k);
      ranges[i / ROWS] = nonzero(packed_A + i * k, k, ROWS);
    }
    for (long j = j0; j < j1; j += COLUMNS) {
      long columns = least(COLUMNS, j1 - j), width = up_to_multiple(columns, LANES);
      pack(B.at + j * B.column + from * B.row, B.column, B.row, columns, k, width, packed_B);
      Range right = nonzero(packed_B, k, width);
      for (long i = 0; i < m; i += ROWS) {
        long rows = least(ROWS, m - i);
        if (how->is_lower && j > i + rows - 1) { /* above the diagonal */
          for (long r = 0; r < (adds ? 0 : rows); r++) memset(C + (i + r) * C_row + j, 0, 8 * columns);
          continue;
        }
        long first = most(ranges[i / ROWS].first, right.first), last = least(ranges[i / ROWS].last, right.last);
        multiply_panels(width, most(last - first, 0), packed_A + i * k + first * ROWS, packed_B + first * width, how->alpha, tile);
        if (rows == ROWS && columns == COLUMNS) /* the compiler makes straight lines of loops that it knows */
          finish(tile, ROWS, COLUMNS, i, j, C, C_row, adds, is_last, how);
        else
          finish(tile, rows, columns, i, j, C, C_row, adds, is_last, how);
      }
    }
  }
}

/* Columns a task, so that all threads have work. */
static long columns_of_task(long batch, long n) {
  long threads = omp_get_max_threads(), tasks = (n + CHUNK - 1) / CHUNK;
  while (batch * tasks % threads && n / tasks > 2 * COLUMNS) tasks++;
  return up_to_multiple((n + tasks - 1) / tasks, LANES);
}

int product(long batch, long m, long n, long k, const double *A, long A_next, long A_row, long A_column, const double *B,
            long B_next, long B_row, long B_column, double *C, long C_next, long C_row, double alpha, int adds,
            int is_lower, const double *cap, long cap_next) {
  if (!batch || !m || !n) return 0;
  long columns = columns_of_task(batch, n), tasks = (n + columns - 1) / columns;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch * tasks > 1)
  for (long task = 0; task < batch * tasks; task++) {
    long e = task / tasks, j0 = task % tasks * columns, j1 = least(n, j0 + columns);
    Finish how = {.alpha = alpha, .adds = adds, .is_lower = is_lower, .cap = cap ? cap + e * cap_next : NULL};
    double *space = workspace(space_of_product(m, k));
    Matrix left = {A + e * A_next, A_row, A_column}, right = {B + e * B_next, B_row, B_column};
    if (space)
      multiply_matrices(m, k, j0, j1, left, right, C + e * C_next, C_row, &how, space);
    else
      failed = 1;
  }
  return failed;
}

/* Points a task, from their number alone: sums over points are made of the tasks' own, and must not depend on anything
else. Few enough that all that a task makes of them stays near its core. */
static long points_of_task(long N) {
  long tasks = most(1, (N + POINTS - 1) / POINTS);
  return up_to_multiple((N + tasks - 1) / tasks, COLUMNS);
}

/* k = exp(min(P p, cap)), its image seen = maps k, and the squared norms of the first M rows of that, where P is M × c,
p is c × N and maps is rows × M. */
int project(long batch, long M, long c, long N, long rows, const double *P, const double *p, const double *cap,
            const double *maps, double *k, double *seen, double *norms) {
  if (!batch || !N) return 0;
  long points = points_of_task(N), tasks = (N + points - 1) / points;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch * tasks > 1)
  for (long task = 0; task < batch * tasks; task++) {
    long e = task / tasks, j0 = task % tasks * points, j1 = least(N, j0 + points);
    double *space = workspace(space_of_product(most(M, rows), most(c, M)));
    if (!space) {
      failed = 1;
      continue;
    }
    Matrix left = {P + e * M * c, c, 1}, right = {p + e * c * N, N, 1};
    Finish exponentiate = {.alpha = 1, .cap = cap + e};
    multiply_matrices(M, c, j0, j1, left, right, k + e * M * N, N, &exponentiate, space);
    Matrix map = {maps + e * rows * M, M, 1}, kernel = {k + e * M * N, N, 1};
    Finish with_norms = {.alpha = 1, .norms = norms + e * N, .norm_rows = M};
    multiply_matrices(rows, M, j0, j1, map, kernel, seen + e * rows * N, N, &with_norms, space);
  }
  return failed;
}

typedef struct {
  long M, c, N, rows;
  const double *P, *p, *k, *maps, *seen, *norms_bar, *mean_bar;
  int is_against_seen;
} Projection;

/* The share of points j0 to j1 − 1 in the gradients of one projection; sums over points are added to where asked. */
static void pull_back_points(
    Projection x, long j0, long j1, int adds, double *against, double *P_bar, double *p_bar, double *space) {
  long M = x.M, N = x.N, n = j1 - j0;
  double *seen_bar = space, *E = seen_bar + x.rows * n;
  space = E + M * n;
  for (long i = 0; i < M; i++)
    for (long t = 0; t < n; t++) seen_bar[i * n + t] = 2 * x.norms_bar[j0 + t] * x.seen[i * N + j0 + t];
  for (long i = M; i < x.rows; i++) memcpy(seen_bar + i * n, x.mean_bar + (i - M) * N + j0, 8 * n);

  Matrix image = {seen_bar, n, 1}, other = {(x.is_against_seen ? x.seen : x.k) + j0, 1, N};
  Finish sum = {.alpha = 1, .adds = adds, .is_lower = x.is_against_seen};
  multiply_matrices(x.rows, n, 0, M, image, other, against, M, &sum, space);

  Matrix back = {x.maps, 1, M}, exponents = {E, n, 1};
  Finish weigh = {.alpha = 1, .weights = {x.k + j0, N, 1}};
  multiply_matrices(M, x.rows, 0, n, back, image, E, n, &weigh, space);

  Matrix P_transposed = {x.P, 1, x.c}, p_transposed = {x.p + j0, 1, N};
  Finish whole = {.alpha = 1}, add = {.alpha = 1, .adds = adds};
  multiply_matrices(x.c, M, 0, n, P_transposed, exponents, p_bar + j0, N, &whole, space);
  multiply_matrices(M, n, 0, x.c, exponents, p_transposed, P_bar, x.c, &add, space);
}

/* Gradients of a projection from those of its norms and of the means, the last rows of what was seen. With their stack
s̄ = [2 n̄ ∘ seen, m̄] and E = (mapsᵀ s̄) ∘ k: s̄ (first M rows of seen)ᵀ, of which only the lower triangle is needed, or
s̄ kᵀ; E pᵀ; and Pᵀ E. */
int pull_back_projection(long batch, long M, long c, long N, long rows, const double *P, const double *p,
                         const double *k, const double *maps, const double *seen, const double *norms_bar,
                         const double *mean_bar, int is_against_seen, double *against, double *P_bar, double *p_bar) {
  if (!batch || !N) return 0;
  long points = points_of_task(N), parts = (N + points - 1) / points, groups = least(parts, GROUPS);
  long sums = rows * M + M * c; /* a group of tasks has its own, and they are added up in order */
  double *partial = malloc(8 * batch * groups * sums);
  int failed = !partial;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch * groups > 1)
  for (long task = 0; task < batch * groups; task++) {
    long e = task / groups, group = task % groups, largest = most(most(M, rows), c);
    double *own = partial + task * sums, *space = workspace((rows + M) * points + space_of_product(largest, DEPTH));
    if (!space || !partial) {
      failed = 1;
      continue;
    }
    Projection x = {M, c, N, rows, P + e * M * c, p + e * c * N, k + e * M * N, maps + e * rows * M, seen + e * rows * N,
                    norms_bar + e * N, mean_bar + e * (rows - M) * N, is_against_seen};
    for (long part = group; part < parts; part += groups) {
      long j0 = part * points, j1 = least(N, j0 + points);
      pull_back_points(x, j0, j1, part > group, own, own + rows * M, p_bar + e * c * N, space);
    }
  }
#pragma omp parallel for if (batch > 1)
  for (long e = 0; e < (failed ? 0 : batch); e++)
    for (long group = 0; group < groups; group++) {
      const double *own = partial + (e * groups + group) * sums;
      for (long i = 0; i < rows * M; i++) against[e * rows * M + i] = own[i] + (group ? against[e * rows * M + i] : 0);
      own += rows * M;
      for (long i = 0; i < M * c; i++) P_bar[e * M * c + i] = own[i] + (group ? P_bar[e * M * c + i] : 0);
    }
  free(partial);
  return failed;
}

/* L_ii of a block of s rows in place; 0, or the row whose pivot is not positive, from 1. */
static long factor_block(double *L, long n, long s) {
  for (long j = 0; j < s; j++)
    for (long i = j; i < s; i++) {
      double sum = L[i * n + j];
      for (long p = 0; p < j; p++) sum -= L[i * n + p] * L[j * n + p];
      if (i == j && !(sum > 0 && sum < INFINITY)) return j + 1;
      L[i * n + j] = i == j ? sqrt(sum) : sum / L[j * n + j];
    }
  return 0;
}

/* X ← L⁻¹X for s rows of X, of which row i is not zero in its first `columns` + i · grows numbers. */
static void solve_block(const double *L, long n, long s, double *X, long X_row, long columns, int grows) {
  for (long i = 0; i < s; i++) {
    double *x = X + i * X_row;
    for (long p = 0; p < i; p++)
      for (long c = 0; c < columns + p * grows; c++) x[c] -= L[i * n + p] * X[p * X_row + c];
    for (long c = 0; c < columns + i * grows; c++) x[c] /= L[i * n + i];
  }
}

/* L, whose lower triangle is that of K, becomes the factor of K = L Lᵀ and J its inverse; returns what factor_block
does. J is zero to begin with. */
static long factor_and_invert(long n, double *L, double *J, double *space) {
  double *rest = space;
  space += BLOCK * n;
  for (long b = 0; b < n; b += BLOCK) {
    long s = least(BLOCK, n - b), below = n - b - s, row;
    double *corner = L + b * n + b, *under = corner + s * n;
    if ((row = factor_block(corner, n, s))) return b + row;
    for (long i = 0; i < s; i++)
      for (long r = 0; r < below; r++) rest[i * below + r] = under[r * n + i];
    solve_block(corner, n, s, rest, below, below, 0);
    for (long r = 0; r < below; r++)
      for (long i = 0; i < s; i++) under[r * n + i] = rest[i * below + r];
    Matrix left = {rest, 1, below}, right = {rest, below, 1};
    Finish subtract = {.alpha = -1, .adds = 1, .is_lower = 1};
    multiply_matrices(below, s, 0, below, left, right, under + s, n, &subtract, space);
  }
  for (long b = 0; b < n; b += BLOCK) {
    long s = least(BLOCK, n - b);
    Matrix left = {L + b * n, n, 1}, right = {J, n, 1};
    Finish negate = {.alpha = -1};
    multiply_matrices(s, b, 0, b, left, right, J + b * n, n, &negate, space);
    for (long i = 0; i < s; i++) J[(b + i) * n + b + i] = 1;
    solve_block(L + b * n + b, n, s, J + b * n, n, b + 1, 1);
  }
  return 0;
}

/* The factor L of K = L Lᵀ, of which the lower triangle is given in L, its inverse J, and Σ log L_ii; all NaN where there
is none. */
static double factor(long n, double *L, double *J, double *space) {
  memset(J, 0, 8 * n * n);
  for (long i = 0; i < n; i++) memset(L + i * n + i + 1, 0, 8 * (n - 1 - i));
  if (factor_and_invert(n, L, J, space)) {
    for (long i = 0; i < n * n; i++) L[i] = J[i] = NAN;
    return NAN;
  }
  double sum = 0;
  for (long i = 0; i < n; i++) sum += log(L[i * n + i]);
  return sum;
}

static long space_of_factor(long n) { return BLOCK * n + space_of_product(n, n); }

int inverse_factor(long batch, long n, const double *K, double *L, double *J, double *half_logdet) {
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    double *space = workspace(space_of_factor(n));
    if (space) {
      memcpy(L + e * n * n, K + e * n * n, 8 * n * n);
      half_logdet[e] = factor(n, L + e * n * n, J + e * n * n, space);
    } else
      failed = 1;
  }
  return failed;
}

/* C = α A B, or C + α A B, of whole matrices, with C's rows one after the other. */
static void put(long m, long k, long n, double alpha, Matrix A, Matrix B, int adds, int is_lower, double *C, double *space) {
  Finish how = {.alpha = alpha, .adds = adds, .is_lower = is_lower};
  multiply_matrices(m, k, 0, n, A, B, C, n, &how, space);
}

static Matrix plain(const double *at, long columns) { return (Matrix){at, columns, 1}; }
static Matrix transposed(const double *at, long columns) { return (Matrix){at, 1, columns}; }

/* What deepwishart.products.kernel makes of features, sample by sample: the thin factors P, Qᵀ and p, and K, whose
diagonal is given; `samples` share it and the parameters. */
int kernel_matrices(long batch, long samples, long M, long c, long N, const double *F, const double *f, const double *tt,
                    const double *two_log_height, const double *inverse, const double *diagonal, double *P,
                    double *Q_transposed, double *p, double *K) {
  long width = c + 2;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    double *space = workspace(space_of_product(M, width));
    if (!space) {
      failed = 1;
      continue;
    }
    long shared = e / samples;
    double scale = inverse[shared], largest = two_log_height[shared];
    double *left = P + e * M * width, *right = Q_transposed + e * M * width, *k = K + e * M * M;
    for (long i = 0; i < M; i++, left += width, right += width) {
      double half_norm = 0;
      for (long a = 0; a < c; a++) {
        left[a] = right[a] = F[(e * M + i) * c + a] * scale;
        half_norm -= 0.5 * left[a] * left[a];
      }
      left[c] = half_norm, left[c + 1] = 1;
      right[c] = 1, right[c + 1] = half_norm + largest;
    }
    double *last = p + (e * width + c + 1) * N;
    for (long i = 0; i < c * N; i++) p[e * width * N + i] = f[e * c * N + i] * scale;
    for (long t = 0; t < N; t++) last[t - N] = 1;
    for (long t = 0; t < N; t++) last[t] = largest - 0.5 * scale * scale * tt[e * N + t];
    Finish exponentiate = {.alpha = 1, .cap = &largest};
    Matrix rows = plain(left - M * width, width), columns = transposed(right - M * width, width);
    multiply_matrices(M, width, 0, M, rows, columns, k, M, &exponentiate, space);
    for (long i = 0; i < M; i++) k[i * M + i] = diagonal[shared];
  }
  return failed;
}

/* Gradients of features and parameters from those of K, P and p, of which the first two are used up. */
int pull_back_kernel(long batch, long samples, long M, long c, long N, const double *P, const double *Q_transposed,
                     const double *p, const double *K, const double *tt, const double *inverse, const double *variance,
                     const double *jitter, double *K_bar, double *P_bar, const double *p_bar, double *F_bar,
                     double *f_bar, double *tt_bar, double *height_bar, double *lengthscale_bar) {
  long width = c + 2, square = M * M, thin = M * width;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    double *Q_bar = workspace(thin + space_of_product(most(M, width), M)), *space = Q_bar + thin;
    if (!Q_bar) {
      failed = 1;
      continue;
    }
    double *E = K_bar + e * square, scale = inverse[e / samples], h2 = variance[e / samples], trace = 0;
    for (long i = 0; i < M; i++) {
      double on_diagonal = E[i * M + i];
      trace += on_diagonal;
      for (long j = 0; j < M; j++) E[i * M + j] *= K[e * square + i * M + j];
      E[i * M + i] = on_diagonal * h2;
    }
    const double *left = P + e * thin, *right = Q_transposed + e * thin;
    double *left_bar = P_bar + e * thin;
    put(width, M, M, 1, transposed(left, width), plain(E, M), 0, 0, Q_bar, space);
    put(M, M, width, 1, plain(E, M), plain(right, width), 1, 0, left_bar, space);

    double by_height = jitter[e / samples] * h2 * trace, by_lengthscale = 0;
    for (long i = 0; i < M; i++) {
      double of_norm = left_bar[i * width + c] + Q_bar[(c + 1) * M + i];
      by_height += Q_bar[(c + 1) * M + i];
      for (long a = 0; a < c; a++) {
        double x = left[i * width + a], x_bar = left_bar[i * width + a] + Q_bar[a * M + i] - x * of_norm;
        F_bar[(e * M + i) * c + a] = x_bar * scale;
        by_lengthscale += x * x_bar;
      }
    }
    const double *points = p + e * width * N, *points_bar = p_bar + e * width * N, *last_bar = points_bar + (c + 1) * N;
    for (long i = 0; i < c * N; i++) {
      f_bar[e * c * N + i] = points_bar[i] * scale;
      by_lengthscale += points[i] * points_bar[i];
    }
    for (long t = 0; t < N; t++) {
      by_height += last_bar[t];
      tt_bar[e * N + t] = -0.5 * scale * scale * last_bar[t];
      by_lengthscale += 2 * tt[e * N + t] * tt_bar[e * N + t];
    }
    height_bar[e] = 2 * by_height;
    lengthscale_bar[e] = -by_lengthscale;
  }
  return failed;
}

/* What deepwishart.products.scale makes of K, sample by sample; `samples` share rest, added and H. */
int make_scale(long batch, long samples, long M, long c, double nu, const double *K, const double *rest, const double *added,
          const double *T, const double *H, double *maps, double *C, double *C_inverse, double *D, double *DH,
          double *F_w, double *F, double *trace, double *logdet) {
  long square = M * M, thin = M * c;
  double root = sqrt(nu);
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    long shared = e / samples;
    double *L = workspace(square + space_of_factor(M) + space_of_product(most(M, c), most(M, c))), *space = L + square;
    if (!L) {
      failed = 1;
      continue;
    }
    const double *k = K + e * square, *V = added + shared * square, *t = T + e * thin;
    double *J = maps + e * (square + thin), *Psi = C + e * square, *inverse = C_inverse + e * square;
    double *d = D + e * square, *dh = DH + e * square, *f_w = F_w + e * thin;
    for (long i = 0; i < square; i++) Psi[i] = V[i] + rest[shared] / nu * k[i];
    memcpy(L, k, 8 * square);
    double half_logdet_K = factor(M, L, J, space), half_logdet_Psi = factor(M, Psi, inverse, space);
    logdet[e] = half_logdet_Psi - half_logdet_K + 0.5 * M * log(nu);
    put(M, M, M, root, plain(J, M), plain(Psi, M), 0, 1, d, space);
    put(M, M, M, 1, plain(d, M), plain(H + shared * square, M), 0, 0, dh, space);
    put(M, M, c, 1 / root, plain(d, M), plain(t, c), 0, 0, f_w, space);
    put(c, M, M, 1, transposed(f_w, c), plain(J, M), 0, 0, J + square, space);
    put(M, M, c, 1, plain(Psi, M), plain(t, c), 0, 0, F + e * thin, space);
    double sum = 0;
    for (long i = 0; i < square; i++) sum += d[i] * dh[i];
    trace[e] = sum;
  }
  return failed;
}

/* JᵀΦJ, plus what is there or not, where Φ is the lower triangle of `inner` with `shift` added to its diagonal and half of
that taken; `inner` is used up, and `other` as large. */
static void pull_back_factor(
    long M, double *inner, double shift, const double *J, int adds, double *K_bar, double *other, double *space) {
  for (long i = 0; i < M; i++) inner[i * M + i] = 0.5 * (inner[i * M + i] + shift);
  put(M, M, M, 1, plain(inner, M), plain(J, M), 0, 1, other, space);
  put(M, M, M, 1, transposed(J, M), plain(other, M), adds, 0, K_bar, space);
}

int pull_back_scale(long batch, long samples, long M, long c, double nu, const double *K, const double *rest,
                    const double *T, const double *maps, const double *C, const double *C_inverse, const double *D,
                    const double *DH, const double *F_w, const double *against, const double *F_bar,
                    const double *trace_bar, const double *logdet_bar, double *K_bar, double *rest_bar,
                    double *added_bar, double *T_bar, double *H_bar) {
  long square = M * M, thin = M * c;
  double root = sqrt(nu);
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    double *JJ_bar = workspace(4 * square + thin + space_of_product(most(M, c), most(M, c))), *CC_bar = JJ_bar + square;
    double *D_bar = CC_bar + square, *other = D_bar + square, *C_F_bar = other + square, *space = C_F_bar + thin;
    if (!JJ_bar) {
      failed = 1;
      continue;
    }
    const double *k = K + e * square, *t = T + e * thin, *J = maps + e * (square + thin), *f_w = F_w + e * thin;
    const double *c_e = C + e * square, *d = D + e * square, *dh = DH + e * square;
    const double *J_bar = against + e * (square + thin), *F_w_bar_transposed = J_bar + square;
    double *t_bar = T_bar + e * thin, *Psi_bar = added_bar + e * square, share = rest[e / samples] / nu;

    memset(D_bar, 0, 8 * square);
    for (long i = 0; i < M; i++)
      for (long j = 0; j <= i; j++) {
        JJ_bar[i * M + j] = -J_bar[i * M + j];
        D_bar[i * M + j] = 2 * trace_bar[e] * dh[i * M + j];
      }
    for (long i = 0; i < M; i++) memset(JJ_bar + i * M + i + 1, 0, 8 * (M - 1 - i));
    Matrix F_w_bar = transposed(F_w_bar_transposed, M);
    put(M, c, M, -1, plain(f_w, c), plain(F_w_bar_transposed, M), 1, 1, JJ_bar, space);
    put(M, c, M, 1 / root, F_w_bar, transposed(t, c), 1, 1, D_bar, space);
    put(M, M, M, trace_bar[e], transposed(d, M), plain(d, M), 0, 0, H_bar + e * square, space);
    put(M, M, c, 1, transposed(c_e, M), plain(F_bar + e * thin, c), 0, 0, C_F_bar, space);
    memcpy(t_bar, C_F_bar, 8 * thin);
    put(M, M, c, 1 / root, transposed(d, M), F_w_bar, 1, 0, t_bar, space);
    put(M, M, M, -1, plain(D_bar, M), transposed(d, M), 1, 1, JJ_bar, space);
    put(M, M, M, 1, transposed(d, M), plain(D_bar, M), 0, 1, CC_bar, space);
    put(M, c, M, 1, plain(C_F_bar, c), transposed(t, c), 1, 1, CC_bar, space);

    pull_back_factor(M, CC_bar, logdet_bar[e], C_inverse + e * square, 0, Psi_bar, other, space);
    double sum = 0;
    for (long i = 0; i < square; i++) {
      sum += Psi_bar[i] * k[i];
      K_bar[e * square + i] = share * Psi_bar[i];
    }
    rest_bar[e] = sum / nu;
    pull_back_factor(M, JJ_bar, -logdet_bar[e], J, 1, K_bar + e * square, other, space);
  }
  return failed;
}

/* What deepwishart.products.output makes of K, sample by sample; `samples` share ell and v. */
int make_output(long batch, long samples, long M, long columns, const double *K, const double *ell, const double *v,
                double *maps, double *K_ell, double *H_inverse, double *z, double *half_logdet, double *kl) {
  long square = M * M, thin = M * columns;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    double *H = workspace(square + 2 * thin + space_of_factor(M) + space_of_product(most(M, columns), most(M, columns)));
    double *W_v = H + square, *K_z = W_v + thin, *space = K_z + thin;
    if (!H) {
      failed = 1;
      continue;
    }
    const double *k = K + e * square, *l = ell + e / samples * square;
    double *W = maps + e * (square + thin), *k_ell = K_ell + e * square, *inverse = H_inverse + e * square;
    double *z_e = z + e * thin;
    put(M, M, M, 1, plain(k, M), plain(l, M), 0, 0, k_ell, space);
    put(M, M, M, 1, transposed(l, M), plain(k_ell, M), 0, 1, H, space);
    for (long i = 0; i < M; i++) H[i * M + i] += 1;
    half_logdet[e] = factor(M, H, inverse, space);
    put(M, M, M, 1, plain(inverse, M), transposed(l, M), 0, 0, W, space);
    put(M, M, columns, 1, plain(W, M), plain(v + e / samples * thin, columns), 0, 0, W_v, space);
    put(M, M, columns, 1, transposed(W, M), plain(W_v, columns), 0, 0, z_e, space);
    put(M, M, columns, 1, plain(k, M), plain(z_e, columns), 0, 0, K_z, space);
    double trace = -M, zKz = 0;
    for (long i = 0; i < square; i++) trace += inverse[i] * inverse[i];
    for (long i = 0; i < M; i++)
      for (long j = 0; j < columns; j++) {
        zKz += z_e[i * columns + j] * K_z[i * columns + j];
        W[square + j * M + i] = z_e[i * columns + j];
      }
    kl[e] = 0.5 * (columns * trace + zKz) + columns * half_logdet[e];
  }
  return failed;
}

int pull_back_output(long batch, long samples, long M, long columns, const double *K, const double *ell, const double *v,
                     const double *maps, const double *K_ell, const double *H_inverse, const double *z,
                     const double *maps_bar, const double *kl_bar, double *K_bar, double *ell_bar, double *v_bar) {
  long square = M * M, thin = M * columns;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed) if (batch > 1)
  for (long e = 0; e < batch; e++) {
    double *W_bar = workspace(4 * square + 3 * thin + space_of_product(most(M, columns), most(M, columns)));
    double *HH_bar = W_bar + square, *C_bar = HH_bar + square, *other = C_bar + square, *z_bar = other + square;
    double *W_v = z_bar + thin, *W_z_bar = W_v + thin, *space = W_z_bar + thin, weight = kl_bar[e];
    if (!W_bar) {
      failed = 1;
      continue;
    }
    const double *k = K + e * square, *l = ell + e / samples * square, *v_e = v + e / samples * thin;
    const double *W = maps + e * (square + thin), *inverse = H_inverse + e * square, *z_e = z + e * thin;
    const double *own_bar = maps_bar + e * (square + thin);

    for (long i = 0; i < M; i++)
      for (long j = 0; j < columns; j++) z_bar[i * columns + j] = own_bar[square + j * M + i];
    put(M, M, columns, weight, plain(k, M), plain(z_e, columns), 1, 0, z_bar, space);
    put(M, M, columns, 1, plain(W, M), plain(v_e, columns), 0, 0, W_v, space);
    put(M, M, columns, 1, plain(W, M), plain(z_bar, columns), 0, 0, W_z_bar, space);
    put(M, M, columns, 1, transposed(W, M), plain(W_z_bar, columns), 0, 0, v_bar + e * thin, space);
    memcpy(W_bar, own_bar, 8 * square);
    put(M, columns, M, 1, plain(W_v, columns), transposed(z_bar, columns), 1, 0, W_bar, space);
    put(M, columns, M, 1, plain(W_z_bar, columns), transposed(v_e, columns), 1, 0, W_bar, space);

    put(M, M, M, -1, plain(W_bar, M), transposed(W, M), 0, 1, HH_bar, space);
    put(M, M, M, -columns * weight, plain(inverse, M), transposed(inverse, M), 1, 1, HH_bar, space);
    pull_back_factor(M, HH_bar, columns * weight, inverse, 0, other, C_bar, space);
    for (long i = 0; i < M; i++)
      for (long j = 0; j < M; j++) C_bar[i * M + j] = other[i * M + j] + other[j * M + i];
    put(M, M, M, 1, transposed(W_bar, M), plain(inverse, M), 0, 0, ell_bar + e * square, space);
    put(M, M, M, 1, plain(K_ell + e * square, M), plain(C_bar, M), 1, 0, ell_bar + e * square, space);
    put(M, M, M, 1, plain(C_bar, M), transposed(l, M), 0, 0, other, space);
    put(M, M, M, 0.5, plain(l, M), plain(other, M), 0, 0, K_bar + e * square, space);
    put(M, columns, M, 0.5 * weight, plain(z_e, columns), transposed(z_e, columns), 1, 0, K_bar + e * square, space);
  }
  return failed;
}
