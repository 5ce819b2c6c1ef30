package gateway

import (
	"encoding/json"
	"math"
	"net/http"
	"time"

	"prefixgate/internal/openai"
	"prefixgate/internal/route"
)

// explanation is the answer of POST /v1/explain: what would be chosen for a request, and why. Nothing is sent or recorded.
type explanation struct {
	Endpoint     string               `json:"endpoint"`
	Model        string               `json:"model"`
	Policy       string               `json:"policy"`
	PromptTokens int                  `json:"prompt_tokens"`
	LoadOnly     string               `json:"load_only,omitempty"`
	BlockTokens  int                  `json:"block_tokens,omitempty"`
	Blocks       int                  `json:"blocks"`
	Replica      string               `json:"replica,omitempty"`
	Reason       string               `json:"reason,omitempty"`
	ExpectedTTFT float64              `json:"expected_ttft_seconds"`
	Candidates   []explainedCandidate `json:"candidates"`
}

// explainedCandidate is one replica as the policy sees it.
type explainedCandidate struct {
	Replica       string   `json:"replica"`
	Healthy       bool     `json:"healthy"`
	Draining      bool     `json:"draining"`
	MatchedTokens int      `json:"matched_tokens"`
	MatchedBlocks int      `json:"matched_blocks"`
	MaxAgeSeconds float64  `json:"residence_seconds,omitempty"`
	QueuedTokens  int64    `json:"queued_tokens"`
	InFlight      int      `json:"in_flight"`
	Running       int      `json:"running"`
	Waiting       int      `json:"waiting"`
	KVUsage       *float64 `json:"kv_usage,omitempty"`
	PrefillRate   float64  `json:"prefill_tokens_per_second"`
	MetricsFresh  bool     `json:"metrics_fresh"`
	// Cost is what the policy minimizes, in its own unit; absent if its filters keep the replica out.
	Cost *float64 `json:"cost,omitempty"`
}

// explainGuarded answers POST /v1/explain to those who present the token, if one is configured.
func (g *Gateway) explainGuarded(w http.ResponseWriter, r *http.Request) {
	if g.explainToken != "" && !authorized(r, g.explainToken.Reveal()) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		g.refuseLocal(w, r, &openai.Error{
			Status: http.StatusUnauthorized, Type: openai.TypeInvalidRequest, Code: "unauthorized",
			Message: "this endpoint wants the token of server.explain.token_file as a bearer token",
		})
		return
	}
	g.explain(w, r)
}

// explain runs the pipeline up to the choice. The body is that of the request to be explained; a body with a prompt and no
// messages is taken for a completion, and the query parameter endpoint says so explicitly.
func (g *Gateway) explain(w http.ResponseWriter, r *http.Request) {
	s := &g.server
	body, err := readBody(w, r, s.MaxBodyBytes, s.BodyTimeout, s.BodyMinRate)
	if err == nil {
		body, err = openai.DecodeBody(r.Header, body, s.MaxBodyBytes)
	}
	if err != nil {
		g.refuseLocal(w, r, err)
		return
	}
	ep := openai.Chat
	if r.URL.Query().Get("endpoint") == openai.Completions.String() {
		ep = openai.Completions
	} else if _, messages := jsonMember(body, "messages"); !messages && json.Valid(body) {
		if _, prompt := jsonMember(body, "prompt"); prompt {
			ep = openai.Completions
		}
	}
	x := &exchange{g: g, w: w, r: r, endpoint: ep, start: time.Now(), label: labelNone, policy: g.explainPolicy, body: body, current: &attempt{}, survey: &survey{}}
	if x.req, err = openai.Parse(ep, body); err == nil {
		err = x.resolve()
	}
	if err != nil {
		g.refuseLocal(w, r, err)
		return
	}
	x.loadOnly = x.tryEncode(r.Context())
	x.look()
	x.chain()
	x.match(r.Context())
	answer, err := json.Marshal(x.explained())
	x.encoded.Release()
	if err != nil {
		panic("BUG: an explanation that does not marshal: " + err.Error())
	}
	g.answerLocal(w, r, answer)
}

// explained puts together what the pipeline has found.
func (x *exchange) explained() explanation {
	e := explanation{
		Endpoint: x.endpoint.String(), Model: x.label, Policy: x.policy.Name(), PromptTokens: x.promptTokens,
		LoadOnly: string(x.loadOnly), Candidates: []explainedCandidate{},
	}
	if len(x.chains) > 0 {
		e.BlockTokens = x.chains[0].blockTokens
		for _, p := range x.chains[0].prompts {
			e.Blocks += len(p)
		}
	}
	for i := range x.candidates {
		x.candidates[i].MatchedTokens = x.believed[i].tokens
	}
	q := x.routeRequest()
	var costs []float64
	if c, ok := x.policy.(interface {
		AppendCosts(dst []float64, req *route.Request, candidates []route.Candidate) []float64
	}); ok {
		costs = c.AppendCosts(nil, &q, x.candidates)
	}
	if d, ok := x.policy.Pick(&q, x.candidates); ok {
		e.Replica = x.candidates[d.Index].ID.Addr
		e.Reason = string(d.Reason)
		e.ExpectedTTFT = d.ExpectedTTFT.Seconds()
	}
	for i := range x.candidates {
		c := &x.candidates[i]
		s := &x.snapshots[x.at[i]]
		ec := explainedCandidate{
			Replica: c.ID.Addr, Healthy: c.Healthy, Draining: c.Draining,
			MatchedTokens: c.MatchedTokens, MatchedBlocks: x.believed[i].blocks,
			MaxAgeSeconds: residence(s).Seconds(),
			QueuedTokens:  c.QueuedTokens, InFlight: c.InFlight, Running: c.Running, Waiting: c.Waiting,
			PrefillRate: c.PrefillRate, MetricsFresh: c.MetricsFresh,
		}
		if kv := c.KVUsage; !math.IsNaN(kv) {
			ec.KVUsage = &kv
		}
		if i < len(costs) && !math.IsInf(costs[i], 0) && !math.IsNaN(costs[i]) {
			ec.Cost = &costs[i]
		}
		e.Candidates = append(e.Candidates, ec)
	}
	return e
}
