package route

import "math"

// rule is what differs between policies. It sees the survey of the candidates and picks among those that the survey allows,
// of which there is at least one.
type rule interface {
	pick(req *Request, candidates []Candidate, s survey) Decision
	// cost is what the rule minimizes, for one allowed candidate.
	cost(req *Request, c *Candidate, s *survey) float64
}

// Selector is a policy: the filters, which are the same for all, in front of a rule.
type Selector struct {
	name       string
	rule       rule
	limits     limits
	probeEvery uint64
	probes     *sequence
}

var _ Policy = (*Selector)(nil)

// New returns the policy that opts names. The error says what is wrong with opts, with key paths.
func New(opts Options) (*Selector, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	s := &Selector{name: opts.Policy, limits: newLimits(opts), probes: newSequence(opts)}
	if s.name == "" {
		s.name = LeastTTFT
	}
	switch s.name {
	case RoundRobin, Random, PowerOfTwo: // They visit all anyway, and a round robin that skips a turn falls out of step.
	default:
		s.probeEvery = uint64(or(opts.ProbeEvery, 1024))
	}
	switch s.name {
	case LeastTTFT:
		s.rule = newLeastTTFT(opts)
	case Session:
		s.rule = newSession(opts)
	case PrefixHash:
		s.rule = newPrefixHash(opts)
	case SimHash:
		s.rule = newSimHash(opts)
	case Weighted:
		s.rule = newWeighted(opts)
	case LongestPrefix:
		s.rule = newLongestPrefix(opts)
	case LeastLoad:
		s.rule = newLeastLoad(opts)
	case PowerOfTwo:
		s.rule = &powerOfTwo{draws: newSequence(opts)}
	case RoundRobin:
		s.rule = newRoundRobin(opts)
	case Random:
		s.rule = &randomPick{draws: newSequence(opts)}
	default:
		panic("BUG: a policy without a rule: " + s.name)
	}
	return s, nil
}

// Name returns the policy's name in the configuration.
func (s *Selector) Name() string { return s.name }

// Pick chooses among candidates: filters first, then the rule. It allocates nothing and is safe for concurrent use.
func (s *Selector) Pick(req *Request, candidates []Candidate) (d Decision, ok bool) {
	sv := s.limits.survey(req, candidates)
	if sv.allowed == 0 {
		return Decision{}, false
	}
	if i, ok := s.probe(req, candidates); ok && sv.usable > 1 {
		return Decision{Index: i, Reason: ReasonProbe, ExpectedTTFT: expectedTTFT(req, &candidates[i], &sv)}, true
	}
	d = s.rule.pick(req, candidates, sv)
	d.ExpectedTTFT = expectedTTFT(req, &candidates[d.Index], &sv)
	switch {
	case sv.level >= levelSaturated:
		d.Reason = ReasonSaturated
	case sv.usable == 1:
		d.Reason = ReasonOnly
	}
	return d, true
}

// AppendCosts appends for each candidate what the policy minimizes, +Inf for those that the filters keep out, and returns the
// extended slice. The unit is the policy's: seconds for least-ttft. It is for explanations; Pick does not use it.
func (s *Selector) AppendCosts(dst []float64, req *Request, candidates []Candidate) []float64 {
	sv := s.limits.survey(req, candidates)
	for i := range candidates {
		cost := math.Inf(1)
		if c := &candidates[i]; sv.allows(req, c) {
			cost = s.rule.cost(req, c, &sv)
		}
		dst = append(dst, cost)
	}
	return dst
}

// probe says whether this decision is to test an idle candidate, and which. Both are pseudorandom functions of the number of
// decisions so far: a fixed period would fall in step with traffic that alternates between two sets of candidates, and
// would then probe only one of them.
func (s *Selector) probe(req *Request, candidates []Candidate) (int, bool) {
	if s.probeEvery == 0 || (s.name == Session && req.Session != 0) {
		return 0, false
	}
	n := s.probes.next()
	if n%s.probeEvery != 0 || len(candidates) < 2 {
		return 0, false
	}
	i := int(mix(n) % uint64(len(candidates)))
	c := &candidates[i]
	if !c.Healthy || c.Draining || c.load() > 0 {
		return 0, false // Those with load are being tested all the time.
	}
	return i, true
}

// Margin returns by how much the costs of candidates may differ and still count as equal, in the unit of AppendCosts. It is 0 but for
// policies that go by expected time to first token, under load.
func (s *Selector) Margin(req *Request, candidates []Candidate) float64 {
	sv := s.limits.survey(req, candidates)
	if sv.allowed == 0 {
		return 0
	}
	switch r := s.rule.(type) {
	case *leastTTFT:
		return r.margin(&sv)
	case *session:
		if req.Session == 0 {
			return r.fallback.margin(&sv)
		}
	}
	return 0
}
