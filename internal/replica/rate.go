package replica

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// rateWindow is how many samples the estimate looks at: enough to outvote a quarter of outliers, few enough to follow a
	// replica that changes within some dozens of requests.
	rateWindow = 32
	// rateSpread is the smallest difference of two samples, in tokens, that says something about the slope. Below it the
	// fixed cost of an engine's step decides.
	rateSpread = 128
	// rateMerge joins first tokens that came out of one step of the engine.
	rateMerge = 3 * time.Millisecond
	// rateMin and rateMax clamp the estimate, in tokens per second.
	rateMin, rateMax = 1, 1e8
)

// rateEstimator learns a replica's prefill speed from first tokens. It is safe for concurrent use.
//
// Engines prefill in the order of arrival, so a request's own prefill begins when it was sent or when the first token
// before it came, whichever is later, and ends with its own first token: that is the sample, of its uncached tokens against
// that time. First tokens that come together were computed together and are one sample. The samples lie on a line: a fixed
// cost, and a slope that is one over the rate. The slope is the median of the slopes between all pairs of samples, each
// weighted by its width (Theil and Sen's estimator): no single outlier moves it, and neither does the fixed cost, which
// for short prompts is most of the time. Until sizes differ enough, the median of tokens over time stands in.
type rateEstimator struct {
	rate atomic.Uint64 // Bits of a float64; 0 while unknown.

	mu      sync.Mutex // Guards the fields below.
	tokens  [rateWindow]float64
	seconds [rateWindow]float64
	n       int // Samples ever.
	last    time.Time
	pairs   []slope // Scratch.
}

type slope struct{ value, weight float64 }

// get returns tokens per second; 0 while unknown.
func (e *rateEstimator) get() float64 { return math.Float64frombits(e.rate.Load()) }

// observe takes in a request of uncached tokens whose first token came at now, ttft after it was sent.
func (e *rateEstimator) observe(now time.Time, uncached int, ttft time.Duration) {
	if uncached < 0 || ttft <= 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.n > 0 && now.Sub(e.last) < rateMerge {
		e.tokens[(e.n-1)%rateWindow] += float64(uncached)
		return
	}
	begin := now.Add(-ttft)
	if begin.Before(e.last) {
		begin = e.last
	}
	e.last = now
	e.tokens[e.n%rateWindow] = float64(uncached)
	e.seconds[e.n%rateWindow] = now.Sub(begin).Seconds()
	e.n++
	// The newest sample may still grow by a merge; the next one finds it whole.
	if e.n <= 8 || e.n%4 == 0 {
		if r := e.estimateLocked(); r > 0 {
			e.rate.Store(math.Float64bits(min(max(r, rateMin), rateMax)))
		}
	}
}

func (e *rateEstimator) estimateLocked() float64 {
	n := min(e.n, rateWindow)
	e.pairs = e.pairs[:0]
	for i := range n {
		for j := range i {
			if dx := math.Abs(e.tokens[i] - e.tokens[j]); dx >= rateSpread {
				e.pairs = append(e.pairs, slope{(e.seconds[i] - e.seconds[j]) / (e.tokens[i] - e.tokens[j]), dx})
			}
		}
	}
	if len(e.pairs) >= 3 {
		if m := weightedMedian(e.pairs); m > 0 {
			return 1 / m
		}
	}
	e.pairs = e.pairs[:0]
	for i := range n {
		if e.tokens[i] >= rateSpread && e.seconds[i] > 0 {
			e.pairs = append(e.pairs, slope{e.tokens[i] / e.seconds[i], 1})
		}
	}
	if len(e.pairs) < 3 {
		return 0
	}
	return weightedMedian(e.pairs)
}

// weightedMedian sorts s and returns the value at half of its weight.
func weightedMedian(s []slope) float64 {
	slices.SortFunc(s, func(a, b slope) int {
		switch {
		case a.value < b.value:
			return -1
		case a.value > b.value:
			return 1
		}
		return 0
	})
	total := 0.0
	for _, p := range s {
		total += p.weight
	}
	half := 0.0
	for _, p := range s {
		if half += p.weight; half >= total/2 {
			return p.value
		}
	}
	return s[len(s)-1].value
}
