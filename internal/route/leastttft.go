package route

import (
	"math"
	"time"

	"github.com/cespare/xxhash/v2"
)

// leastTTFT picks the candidate with the least expected time to first token:
//
//	(queued + w * uncached) / rate + decode term + KV term + adapter term
//
// A match attracts by the tokens it saves and by nothing else.
type leastTTFT struct {
	w              float64
	decode         float64 // Seconds per request in flight.
	imbalance      float64 // Seconds for the square of requests in flight beyond the mean and the slack.
	imbalanceSlack float64
	kv             float64 // Seconds at full KV use.
	adapter        float64 // Seconds to load an adapter.
	sample         int
	ties           *sequence
}

func newLeastTTFT(opts Options) *leastTTFT {
	o := opts.LeastTTFT
	p := &leastTTFT{
		w:              or(o.UncachedWeight, 1.5),
		decode:         or(o.DecodeCost, 5*time.Millisecond).Seconds(),
		imbalance:      or(o.ImbalanceCost, 100*time.Millisecond).Seconds(),
		imbalanceSlack: or(o.ImbalanceSlack, 3),
		kv:             or(o.KVCost, 2*time.Second).Seconds(),
		adapter:        or(o.AdapterCost, 500*time.Millisecond).Seconds(),
		sample:         min(or(o.Sample, 8), maxSample),
		ties:           newSequence(opts),
	}
	if p.sample == 0 {
		p.sample = math.MaxInt
	}
	return p
}

// rateStep is the ratio of neighboring steps to which learned rates are rounded. Two estimates of the same hardware differ by
// a few percent; without rounding the luckiest replica would get every cold prompt, and no two gateways would agree.
const rateStep = 1.5

// maxRateSteps bounds how far a replica's rate may be from the median, in steps: about 8 times.
const maxRateSteps = 5

// rate is c's prefill rate for comparing, in tokens per second.
func (s *survey) rateOf(c *Candidate) float64 {
	typical := s.rate * c.weight()
	r := c.PrefillRate
	if !(r > 0) || math.IsInf(r, 1) {
		return typical
	}
	ratio := r / typical
	if ratio > 0.817 && ratio < 1.224 { // Within half a step: no need for logarithms.
		return typical
	}
	steps := math.Round(math.Log(ratio) / math.Log(rateStep))
	return typical * math.Pow(rateStep, max(-maxRateSteps, min(maxRateSteps, steps)))
}

func (p *leastTTFT) cost(req *Request, c *Candidate, s *survey) float64 {
	uncached := float64(req.PromptTokens - req.match(c))
	rate := s.rateOf(c)
	cost := (c.queuedTokens(rate) + p.w*uncached) / rate
	w := c.weight()
	load := float64(c.load()) / w
	cost += p.decode * load
	if over := load - s.meanLoad() - p.imbalanceSlack; over > 0 {
		cost += p.imbalance * over * over
	}
	kv, ok := c.kvUsage()
	if !ok {
		kv = s.meanKV()
	}
	if over := (kv - 0.8) / 0.2; over > 0 {
		cost += p.kv * over * over
	}
	if req.Adapter && c.Adapter != AdapterLoaded {
		cost += p.adapter
	}
	return cost
}

// meanLoad is the mean number of requests for a replica of weight 1.
func (s *survey) meanLoad() float64 { return float64(s.load) / s.weight }

// foreignTokens is the length assumed of a request that waits in an engine and came past the gateways.
const foreignTokens = 1000

// queuedTokens is the prefill work ahead on c in tokens: what the gateways sent, less what is done of the first prompt at the
// given rate, and what the engine says is waiting beyond the gateways' requests.
func (c *Candidate) queuedTokens(rate float64) float64 {
	q := float64(max(0, c.QueuedTokens))
	if c.QueuedPrompts > 0 && c.QueueAge > 0 {
		// The first prompt's own length is not known. Taking it for twice the mean at most keeps a replica that hangs from
		// seeming to work its queue off.
		q -= min(rate*c.QueueAge.Seconds(), q*min(1, 2/float64(c.QueuedPrompts)))
	}
	if c.MetricsFresh && c.Waiting > 0 {
		if foreign := min(c.Waiting, c.Running+c.Waiting-c.InFlight); foreign > 0 {
			q += foreignTokens * float64(foreign)
		}
	}
	return q
}

// margin is by how much costs may differ and still count as equal, in seconds: that of a fifth of the mean load, once there is
// some. Gateways that hear of each other late would otherwise all send to the same least loaded replica until they do.
func (p *leastTTFT) margin(s *survey) float64 {
	return p.decode * max(0, s.meanLoad()-p.imbalanceSlack) / 5
}

// breakTies picks among the candidates that cost at most limit, and says how many of the kind there were. The longest match goes first,
// however short. Where nobody holds anything a rendezvous hash of the prefix decides, so that gateways agree. Of those that hold
// equally much chance draws two (all gateways would else flood the same one until they hear of each other), and of the two the
// hash takes one: the last in its order is never taken, its copy ages, and so a prefix that was once hot gathers on few replicas
// again. Under load, when all that hold the prefix are needed, chance alone decides.
func (p *leastTTFT) breakTies(req *Request, candidates []Candidate, s *survey, limit float64) (best, ties int) {
	chance := p.ties.next()
	hashed := tieBreak{key: req.Prefix}
	if req.Prefix == 0 || s.maxMatch > 0 {
		hashed.key = chance
	}
	first, second := -1, -1 // By chance.
	var firstRank, secondRank uint64
	longest := -1
	for i := range candidates {
		c := &candidates[i]
		match := req.match(c)
		if match < longest || !s.allows(req, c) || p.cost(req, c, s) > limit {
			continue
		}
		if match > longest {
			longest = match
			first, second, firstRank, secondRank = -1, -1, 0, 0
			hashed.start(i)
			best = i
		} else {
			best = hashed.next(candidates, i)
		}
		switch rank := mix(chance ^ xxhash.Sum64String(c.ID.Addr)); {
		case first < 0 || rank > firstRank:
			second, secondRank = first, firstRank
			first, firstRank = i, rank
		case second < 0 || rank > secondRank:
			second, secondRank = i, rank
		}
	}
	switch {
	case longest <= 0 || second < 0:
		return best, hashed.ties
	case p.margin(s) > 0:
		return first, hashed.ties
	}
	ties = hashed.ties
	hashed = tieBreak{key: req.Prefix}
	hashed.start(first)
	return hashed.next(candidates, second), ties
}

// maxSample bounds LeastTTFTOptions.Sample.
const maxSample = 64

// sampleEquals picks again where more candidates than the sample's size hold exactly as much as the cheapest one: the cheapest of a sample of
// them, or any other that is cheaper than the sample. Otherwise everybody would send to the very cheapest for as long as it takes
// them to hear of each other, and in a large fleet that is many requests. The sample of a prompt that nobody holds follows from
// its prefix, so that gateways agree on it; else it is drawn. ok is false if there are too few equals to sample from.
func (p *leastTTFT) sampleEquals(req *Request, candidates []Candidate, s *survey, best int) (index, ties int, ok bool) {
	match := req.match(&candidates[best])
	key := req.Prefix
	if key == 0 || s.maxMatch > 0 {
		key = p.ties.next()
	}
	var chosen [maxSample]int
	var ranks [maxSample]uint64 // Falling; those of chosen.
	n := 0
	other, otherCost := -1, math.Inf(1)
	for i := range candidates {
		c := &candidates[i]
		if !s.allows(req, c) {
			continue
		}
		if req.match(c) != match {
			if cost := p.cost(req, c, s); cost < otherCost {
				other, otherCost = i, cost
			}
			continue
		}
		n++
		rank := mix(key ^ xxhash.Sum64String(c.ID.Addr))
		at := min(n, p.sample) - 1
		if n > p.sample && rank <= ranks[at] {
			continue
		}
		for ; at > 0 && ranks[at-1] < rank; at-- {
			chosen[at], ranks[at] = chosen[at-1], ranks[at-1]
		}
		chosen[at], ranks[at] = i, rank
	}
	if n <= p.sample {
		return 0, 0, false
	}
	cheapest := math.Inf(1)
	tie := tieBreak{key: key}
	for _, i := range chosen[:p.sample] {
		switch cost := p.cost(req, &candidates[i], s); {
		case cost < cheapest:
			cheapest, index = cost, i
			tie.start(i)
		case cost == cheapest:
			index = tie.next(candidates, i)
		}
	}
	if otherCost < cheapest {
		return other, 1, true
	}
	return index, tie.ties, true
}

func (p *leastTTFT) pick(req *Request, candidates []Candidate, s survey) Decision {
	best, bestCost, ties := -1, math.Inf(1), 0
	for i := range candidates {
		if !s.allows(req, &candidates[i]) {
			continue
		}
		switch cost := p.cost(req, &candidates[i], &s); {
		case best < 0 || cost < bestCost:
			best, bestCost, ties = i, cost, 1
		case cost == bestCost:
			ties++
		}
	}
	sampled := false
	if s.allowed > p.sample {
		var i, n int
		if i, n, sampled = p.sampleEquals(req, candidates, &s, best); sampled {
			best, ties = i, n
		}
	}
	if margin := p.margin(&s); !sampled && (ties > 1 || margin > 0) {
		best, ties = p.breakTies(req, candidates, &s, bestCost+margin)
	}
	c := &candidates[best]
	d := Decision{Index: best}
	match := req.match(c)
	switch {
	case match < s.maxMatch:
		d.Reason = ReasonSpread
	case match > s.minMatch:
		d.Reason = ReasonPrefix
	case match == 0 && ties > 1:
		d.Reason = ReasonCold
	default:
		d.Reason = ReasonLoad
	}
	return d
}

// expectedTTFT is the estimate of the time to first token on c, without the weights and prices that only steer the choice
// and without rounding of the rate.
func expectedTTFT(req *Request, c *Candidate, s *survey) time.Duration {
	rate := c.PrefillRate
	if !(rate > 0) || math.IsInf(rate, 1) {
		rate = s.rate * c.weight()
	}
	seconds := (c.queuedTokens(rate) + float64(req.PromptTokens-req.match(c))) / rate
	return time.Duration(min(seconds, 1e6) * float64(time.Second))
}
