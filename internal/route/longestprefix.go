package route

import "math"

// longestPrefix picks the candidate that holds most of the prompt if it holds enough and the loads are balanced, else the
// least loaded.
type longestPrefix struct {
	minMatch   float64
	balanceAbs int
	balanceRel float64
	ties       *sequence
}

func newLongestPrefix(opts Options) *longestPrefix {
	o := opts.LongestPrefix
	p := &longestPrefix{
		minMatch:   or(o.MinMatch, 0.5),
		balanceAbs: or(o.BalanceAbs, 32),
		balanceRel: or(o.BalanceRel, 1.1),
		ties:       newSequence(opts),
	}
	if o.BalanceAbs < 0 {
		p.balanceAbs = math.MaxInt
	}
	return p
}

// byPrefix says whether the longest match decides, rather than the load.
func (p *longestPrefix) byPrefix(req *Request, s *survey) bool {
	if s.maxLoad-s.minLoad > p.balanceAbs && float64(s.maxLoad) > p.balanceRel*float64(s.minLoad) {
		return false
	}
	return s.maxMatch > 0 && float64(s.maxMatch) > p.minMatch*float64(req.PromptTokens)
}

func (p *longestPrefix) cost(req *Request, c *Candidate, s *survey) float64 {
	if p.byPrefix(req, s) {
		return -float64(req.match(c))
	}
	return float64(c.load()) / c.weight()
}

func (p *longestPrefix) pick(req *Request, candidates []Candidate, s survey) Decision {
	if !p.byPrefix(req, &s) {
		i := pickLeastLoaded(req, candidates, &s, p.ties.key(req))
		d := Decision{Index: i, Reason: ReasonLoad}
		if req.match(&candidates[i]) < s.maxMatch {
			d.Reason = ReasonSpread
		}
		return d
	}
	best, bestMatch := -1, -1
	tie := tieBreak{key: p.ties.key(req)}
	for i := range candidates {
		c := &candidates[i]
		if !s.allows(req, c) {
			continue
		}
		match := req.match(c)
		switch {
		case match > bestMatch:
			best, bestMatch = i, match
			tie.start(i)
		case match == bestMatch:
			best = tie.next(candidates, i)
		}
	}
	return Decision{Index: best, Reason: ReasonPrefix}
}
