package route

import "math"

// weighted scores candidates as the endpoint picker of the Gateway API inference extension does, and picks the highest score:
//
//	prefix weight * matched part + queue weight * queue score + KV weight * (1 - KV usage)
//
// The queue score is 1 for the shortest queue among the candidates, 0 for the longest and linear between. Before the score come
// tiers: the adapter's being loaded, then queue and KV cache within their thresholds.
type weighted struct {
	prefix, queue, kv float64
	queueThreshold    int
	kvThreshold       float64
	adapterThreshold  int
	tier              float64 // More than any two scores differ.
	ties              *sequence
}

func newWeighted(opts Options) *weighted {
	o := opts.Weighted
	p := &weighted{
		prefix:           or(o.PrefixWeight, 3),
		queue:            or(o.QueueWeight, 2),
		kv:               or(o.KVWeight, 2),
		queueThreshold:   or(o.QueueThreshold, 5),
		kvThreshold:      or(o.KVThreshold, 0.8),
		adapterThreshold: or(o.AdapterQueueThreshold, 128),
		ties:             newSequence(opts),
	}
	if p.queueThreshold == 0 {
		p.queueThreshold = math.MaxInt
	}
	if p.kvThreshold == 0 {
		p.kvThreshold = 1
	}
	p.tier = p.prefix + p.queue + p.kv + 1
	return p
}

// cost is the tier less the score.
func (p *weighted) cost(req *Request, c *Candidate, s *survey) float64 {
	kv, ok := c.kvUsage()
	if !ok {
		kv = s.meanKV()
	}
	queue := c.queue(s.meanRunning())
	tier := 0
	if queue > p.queueThreshold || kv > p.kvThreshold {
		tier = 1
	}
	if req.Adapter && p.adapterThreshold > 0 {
		switch {
		case queue > p.adapterThreshold:
			tier += 6
		case c.Adapter == AdapterLoaded:
		case c.Adapter == AdapterFull:
			tier += 4
		default:
			tier += 2
		}
	}
	score := p.kv * (1 - kv)
	if req.PromptTokens > 0 {
		score += p.prefix * float64(req.match(c)) / float64(req.PromptTokens)
	}
	if s.maxQueue > s.minQueue {
		score += p.queue * float64(s.maxQueue-queue) / float64(s.maxQueue-s.minQueue)
	} else {
		score += p.queue
	}
	return float64(tier)*p.tier - score
}

func (p *weighted) pick(req *Request, candidates []Candidate, s survey) Decision {
	best, bestCost := -1, math.Inf(1)
	tie := tieBreak{key: p.ties.key(req)}
	for i := range candidates {
		c := &candidates[i]
		if !s.allows(req, c) {
			continue
		}
		cost := p.cost(req, c, &s)
		switch {
		case best < 0 || cost < bestCost:
			best, bestCost = i, cost
			tie.start(i)
		case cost == bestCost:
			best = tie.next(candidates, i)
		}
	}
	c := &candidates[best]
	d := Decision{Index: best}
	switch match := req.match(c); {
	case req.Adapter && s.loaded > 0 && s.loaded < s.allowed && c.Adapter == AdapterLoaded:
		d.Reason = ReasonAdapter
	case match < s.maxMatch:
		d.Reason = ReasonSpread
	case match > s.minMatch:
		d.Reason = ReasonPrefix
	case match == 0 && tie.ties > 1:
		d.Reason = ReasonCold
	default:
		d.Reason = ReasonLoad
	}
	return d
}
