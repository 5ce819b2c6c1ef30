package route

import "math"

// The levels of a usable candidate, best first: only the lowest level that occurs is allowed.
const (
	levelGood        = 0
	levelAdapterFull = 1 // Serving it would push another adapter out.
	levelSaturated   = 2
)

// limits are the bounds of the filters.
type limits struct {
	maxWaiting  int
	maxKVUsage  float64
	maxInFlight int
	defaultRate float64
}

func newLimits(opts Options) limits {
	l := limits{
		maxWaiting:  or(opts.Saturation.MaxWaiting, 256),
		maxKVUsage:  or(opts.Saturation.MaxKVUsage, 0.98),
		maxInFlight: opts.Saturation.MaxInFlight,
		defaultRate: or(opts.LeastTTFT.PrefillRate, 8000),
	}
	if l.maxWaiting == 0 {
		l.maxWaiting = math.MaxInt
	}
	if l.maxKVUsage == 0 {
		l.maxKVUsage = 1
	}
	if l.maxInFlight <= 0 {
		l.maxInFlight = math.MaxInt
	}
	return l
}

// survey is what one pass over the candidates finds. Means and extremes are over the allowed ones.
type survey struct {
	limits  *limits
	usable  int // Healthy and not draining.
	allowed int // Usable, and of the best level.
	level   int // The best level.
	// rate is the median learned prefill rate for a replica of weight 1, in tokens per second, over a sample of the usable
	// candidates; the configured one if none is known.
	rate      float64
	weight    float64 // Sum of weights.
	load      int     // Sum of loads.
	minLoad   int
	maxLoad   int
	maxMatch  int
	minMatch  int
	kvSum     float64 // Sum of the known KV usage.
	kvKnown   int
	running   int // Sum of the running requests of those with fresh metrics, and their number.
	fresh     int
	minQueue  int // Least and greatest number of requests in the engine's queue.
	maxQueue  int
	loaded    int // With the adapter loaded.
	minWeight float64
	maxWeight float64
}

// sampled is how many candidates' rates the median is taken of: all, in a fleet of up to so many.
const sampled = 31

// survey looks at all candidates once.
func (l *limits) survey(req *Request, candidates []Candidate) survey {
	var levels [2 * levelSaturated]survey
	for i := range levels {
		levels[i] = survey{minLoad: math.MaxInt, minMatch: math.MaxInt, minQueue: math.MaxInt, minWeight: math.Inf(1)}
	}
	var rates [sampled]float64
	known, usable := 0, 0
	stride := (len(candidates) + sampled - 1) / sampled
	for i := range candidates {
		c := &candidates[i]
		if !c.Healthy || c.Draining {
			continue
		}
		usable++
		w := c.weight()
		if r := c.PrefillRate; i%stride == 0 && r > 0 && !math.IsInf(r, 1) {
			rates[known] = r / w
			known++
		}
		s := &levels[l.level(req, c)]
		load, match, queue := c.load(), req.match(c), c.queue(0)
		s.allowed++
		s.weight += w
		s.minWeight, s.maxWeight = min(s.minWeight, w), max(s.maxWeight, w)
		s.load += load
		s.minLoad, s.maxLoad = min(s.minLoad, load), max(s.maxLoad, load)
		s.minMatch, s.maxMatch = min(s.minMatch, match), max(s.maxMatch, match)
		s.minQueue, s.maxQueue = min(s.minQueue, queue), max(s.maxQueue, queue)
		if kv, ok := c.kvUsage(); ok {
			s.kvSum += kv
			s.kvKnown++
		}
		if c.tellsRunning() {
			s.running += c.Running
			s.fresh++
		}
		if c.Adapter == AdapterLoaded {
			s.loaded++
		}
	}
	best := 0
	for best < len(levels)-1 && levels[best].allowed == 0 {
		best++
	}
	s := levels[best]
	s.limits, s.level, s.usable = l, best, usable
	s.rate = l.defaultRate
	if known > 0 {
		s.rate = median(rates[:known])
	}
	if s.fresh > 0 && s.fresh < s.allowed {
		s.minQueue, s.maxQueue = math.MaxInt, 0
		for i := range candidates {
			if c := &candidates[i]; s.allows(req, c) {
				queue := c.queue(s.meanRunning())
				s.minQueue, s.maxQueue = min(s.minQueue, queue), max(s.maxQueue, queue)
			}
		}
	}
	return s
}

// level rates one usable candidate.
func (l *limits) level(req *Request, c *Candidate) int {
	level := levelGood
	if req.Adapter && c.Adapter == AdapterFull {
		level |= levelAdapterFull
	}
	if c.InFlight >= l.maxInFlight {
		return level | levelSaturated
	}
	if c.MetricsFresh {
		if kv, ok := c.kvUsage(); c.Waiting > l.maxWaiting || (ok && c.Waiting > 0 && kv > l.maxKVUsage) {
			level |= levelSaturated
		}
	}
	return level
}

// allows says whether a policy may pick c.
func (s *survey) allows(req *Request, c *Candidate) bool {
	return c.Healthy && !c.Draining && s.limits.level(req, c) == s.level
}

// meanRunning is how many requests a replica that does not tell is taken to run.
func (s *survey) meanRunning() int {
	if s.fresh == 0 {
		return 0
	}
	return s.running / s.fresh
}

// meanKV is what is assumed of a replica that does not tell its KV usage: neither better nor worse than the others.
func (s *survey) meanKV() float64 {
	if s.kvKnown == 0 {
		return 0
	}
	return s.kvSum / float64(s.kvKnown)
}

// evenWeights says whether all allowed candidates have the same weight.
func (s *survey) evenWeights() bool { return s.minWeight == s.maxWeight }

// match is how many tokens of the prompt c holds, kept to what is possible.
func (r *Request) match(c *Candidate) int {
	return max(0, min(c.MatchedTokens, r.PromptTokens))
}

// load is the number of requests on c: those of the gateways, or the engine's own count if it is fresh and higher, since
// then others use the replica too. Right after many requests have ended the engine's count is out of date and the load is
// taken too high, until the next scrape at most.
func (c *Candidate) load() int {
	if c.MetricsFresh {
		return max(0, c.InFlight, c.Running+c.Waiting)
	}
	return max(0, c.InFlight)
}

// queue is the number of requests waiting in c's engine: its own count, or the requests in flight beyond those it runs if
// these are more, so that what was sent since the last scrape counts. Without fresh metrics running stands for those it runs.
func (c *Candidate) queue(running int) int {
	if c.tellsRunning() {
		return max(0, c.Waiting, c.InFlight-c.Running)
	}
	return max(0, c.InFlight-running)
}

// tellsRunning says whether the engine's own count of running requests can be used.
func (c *Candidate) tellsRunning() bool { return c.MetricsFresh && c.Running >= 0 }

// kvUsage is the use of c's KV cache, if it is known.
func (c *Candidate) kvUsage() (float64, bool) {
	if !c.MetricsFresh || !(c.KVUsage >= 0) {
		return 0, false
	}
	return min(c.KVUsage, 1), true
}

// weight is c's relative capacity.
func (c *Candidate) weight() float64 {
	if w := c.Weight; w > 0 && !math.IsInf(w, 1) {
		return w
	}
	return 1
}

// median sorts v in place and returns its middle, the lower one of two.
func median(v []float64) float64 {
	for i := 1; i < len(v); i++ {
		for j := i; j > 0 && v[j] < v[j-1]; j-- {
			v[j], v[j-1] = v[j-1], v[j]
		}
	}
	return v[(len(v)-1)/2]
}
