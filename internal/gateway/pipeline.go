package gateway

import (
	"errors"
	"net/http"
	"strings"

	"prefixgate/internal/openai"
	"prefixgate/internal/proxy"
)

// complete is the way of a chat or completion request through the gateway, from its first byte to its last. No stage calls
// the next, and what fails before Forward costs a request its prefix at most: without token ids it is routed by load.
func (g *Gateway) complete(w http.ResponseWriter, r *http.Request, ep openai.Endpoint) {
	x := g.begin(w, r, ep)
	defer x.end() // metrics and the access line

	err := x.readBody() // bounded in size and time, decompressed
	if err == nil {
		x.req, err = openai.Parse(ep, x.body) // what decides, and nothing else
	}
	if err == nil {
		err = x.resolve() // the model, its tokenizer and the replicas that serve it
	}
	if err != nil {
		x.refuse(err, outcomeRejected)
		return
	}
	x.encode(r.Context()) // token ids, or the reason why load alone decides
	x.look()              // each replica's load, as of now
	x.chain()             // the prompt's block hashes
	x.match(r.Context())  // how much of it each replica holds
	x.forward(x.body)     // pick a replica, stream its answer; once begun, credit it with the prompt
	x.record()            // behind the request: credit it with the answer, too
}

// pass is the way of a request that the gateway does not look into: to the least loaded replica that serves the model, if it
// names one, unchanged.
func (g *Gateway) pass(w http.ResponseWriter, r *http.Request) {
	x := g.begin(w, r, openai.EndpointOf(r.URL.Path))
	defer x.end()

	x.policy = g.leastLoad
	x.loadOnly = passedOn
	g.metrics.loadOnly.WithLabelValues(string(passedOn)).Inc()
	var body []byte
	if buffered(r) {
		if err := x.readBody(); err != nil {
			x.refuse(err, outcomeRejected)
			return
		}
		// What cannot be parsed is the engine's to refuse.
		if req, err := openai.Parse(x.endpoint, x.body); err == nil {
			x.req = req
			if err := x.resolve(); err != nil {
				x.refuse(err, outcomeRejected)
				return
			}
		}
		body = x.body
	} else {
		x.stream()
	}
	if len(x.snapshots) == 0 {
		x.snapshots = g.fleet.AppendSnapshots(x.snapshots)
	}
	x.look()
	x.match(r.Context())
	x.forward(body)
}

// passedOn marks requests of the endpoints that have no prefix routing.
const passedOn fallback = fallback(openai.ReasonEndpoint)

// buffered says whether a request's body is read before it is sent on: JSON is, so that it can be sent again to another
// replica and its model is known. Anything else, such as an audio file, is streamed.
func buffered(r *http.Request) bool {
	if r.Body == nil || r.Body == http.NoBody {
		return false
	}
	kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	kind = strings.ToLower(strings.TrimSpace(kind))
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// stream prepares a body that is streamed: bounded in size and time, never held in memory.
func (x *exchange) stream() {
	if x.r.Body == nil || x.r.Body == http.NoBody {
		return
	}
	s := &x.g.server
	paced := newPacedBody(x.w, x.r, s.BodyTimeout, s.BodyMinRate)
	x.limited = &limitedBody{ReadCloser: http.MaxBytesReader(x.w, paced, s.MaxBodyBytes), limit: s.MaxBodyBytes}
	x.r.Body = x.limited
}

// forward sends the request to replicas until one answers, and streams the answer.
func (x *exchange) forward(body []byte) {
	if x.decideFrom.IsZero() {
		x.decideFrom = x.start
	}
	o := x.g.proxy.Forward(x.w, x.r, proxy.Call{Body: body, Next: x.next, Header: x.header, Observer: &x.response})
	x.response.end()
	x.forwarded, x.err, x.status = o, o.Err, o.Status
	x.result = outcome(o.Result)
	if o.Result == proxy.ResultOK {
		switch {
		case o.Status >= 500:
			x.result = outcomeEngine5xx
		case o.Status >= 400:
			x.result = outcomeEngine4xx
		case x.response.incomplete():
			x.result = outcomeIncomplete
		default:
			x.result = outcomeOK
		}
	}
	switch {
	case o.Written:
	case o.Result == proxy.ResultClientGone:
		x.forwarded.Abort = true // or the server would answer for us, with an empty 200
	case o.Result == proxy.ResultBadBody:
		refuseRest(x.w)
		x.refuse(x.limited.failed.Load(), outcomeRejected)
	default:
		x.refuse(failure(o.Result, x.g), x.result)
		x.err = o.Err
	}
}

// failure is what a client is told of an end without an answer.
func failure(result proxy.Result, g *Gateway) error {
	switch result {
	case proxy.ResultNoReplica:
		return openai.NoReplica(g.retryAfter)
	case proxy.ResultFirstByteTimeout, proxy.ResultTotalTimeout, proxy.ResultIdleTimeout:
		return openai.Timeout()
	case proxy.ResultDial, proxy.ResultFailed, proxy.ResultRefused, proxy.ResultBroken:
		return openai.UpstreamFailed()
	case proxy.ResultOK, proxy.ResultBadBody, proxy.ResultClientGone, proxy.ResultClientStalled:
	}
	return errors.New("BUG: no answer, and no reason for it")
}
