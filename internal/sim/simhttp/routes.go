package simhttp

import (
	"encoding/json"
	"net/http"
	"slices"

	"prefixgate/internal/openai"
)

// route is a path and the one method it takes.
type route struct {
	method string
	handle http.HandlerFunc
}

func (s *Server) handler() http.Handler {
	routes := map[string]route{
		"/health":              {http.MethodGet, s.health},
		"/ping":                {http.MethodGet, s.health},
		"/version":             {http.MethodGet, s.version},
		"/load":                {http.MethodGet, s.load},
		"/v1/models":           {http.MethodGet, s.models},
		"/v1/chat/completions": {http.MethodPost, s.chat},
		"/v1/completions":      {http.MethodPost, s.completions},
		"/tokenize":            {http.MethodPost, s.tokenize},
		"/detokenize":          {http.MethodPost, s.detokenize},
		"/reset_prefix_cache":  {http.MethodPost, s.resetPrefixCache},
		"/metrics":             {http.MethodGet, s.metrics.handler.ServeHTTP},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.enter() {
			panic(http.ErrAbortHandler)
		}
		defer s.handlers.Done()
		if s.fault.Load().Kind == FaultHang {
			<-r.Context().Done()
			return
		}
		rt, ok := routes[r.URL.Path]
		switch {
		case !ok:
			writeDetail(w, http.StatusNotFound, "Not Found")
		case r.Method != rt.method && (r.Method != http.MethodHead || rt.method != http.MethodGet) && (r.URL.Path != "/ping" || r.Method != http.MethodPost):
			w.Header().Set("Allow", rt.method)
			writeDetail(w, http.StatusMethodNotAllowed, "Method Not Allowed")
		default:
			rt.handle(w, r)
		}
	})
}

// enter counts a request in that stop waits for; it refuses what comes after the end.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.handlers.Add(1)
	return true
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Length", "0")
	if s.fault.Load().Kind == FaultUnhealthy {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}

func (s *Server) version(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, struct {
		Version string `json:"version"`
	}{Version})
}

func (s *Server) load(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, struct {
		ServerLoad int64 `json:"server_load"`
	}{s.inFlight.Load()})
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	created := s.started.Unix()
	card := func(id, root string) modelCard {
		return modelCard{
			ID: id, Object: "model", Created: created, OwnedBy: "vllm", Root: root,
			Permission: []modelPermission{{
				ID: "modelperm-" + hex(mixID(uint64(created), uint64(len(id)))), Object: "model_permission", Created: created,
				AllowSampling: true, AllowLogprobs: true, AllowView: true, Organization: "*",
			}},
		}
	}
	list := modelList{Object: "list"}
	for _, id := range append([]string{s.opts.Model}, s.opts.Aliases...) {
		c := card(id, s.opts.Root)
		c.MaxModelLen = &s.opts.MaxModelLen
		list.Data = append(list.Data, c)
	}
	for _, id := range s.adapterNames() {
		c := card(id, s.opts.Adapters[id])
		c.Parent = &s.opts.Model
		list.Data = append(list.Data, c)
	}
	writeJSON(w, http.StatusOK, list)
}

func (s *Server) adapterNames() []string {
	names := make([]string, 0, len(s.opts.Adapters))
	for name := range s.opts.Adapters {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// tokenize tells what a prompt or a chat becomes.
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r)
	if err != nil {
		return
	}
	var kind struct {
		Messages json.RawMessage `json:"messages"`
	}
	ep := openai.Completions
	if json.Unmarshal(body, &kind) == nil && kind.Messages != nil {
		ep = openai.Chat
	}
	var c call
	if err := s.read(r, &c, ep, body); err != nil {
		writeError(w, err)
		return
	}
	if err := s.check(&c); err != nil {
		writeError(w, err)
		return
	}
	enc, err := s.encode(r.Context(), c.req)
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []uint32 `json:"tokens"`
		TokenStrs   []string `json:"token_strs"`
	}{len(enc.Prompts[0].IDs), s.opts.MaxModelLen, enc.Prompts[0].IDs, nil})
}

func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r)
	if err != nil {
		return
	}
	var in struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := json.Unmarshal(body, &in); err != nil {
		writeError(w, invalid("body.tokens", "{'type': 'list_type', 'loc': 'body.tokens', 'msg': 'Input should be a valid list'}"))
		return
	}
	d, err := s.detokenizer()
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, struct {
		Prompt string `json:"prompt"`
	}{d.Decode(in.Tokens, false)})
}

func (s *Server) resetPrefixCache(w http.ResponseWriter, _ *http.Request) {
	// vLLM answers 200 whether or not a running request kept it from doing so.
	s.live.resetCache()
	w.Header().Set("Content-Length", "0")
}

// useAdapter counts the requests in flight that use an adapter.
func (s *Server) useAdapter(name string, delta int) {
	if name == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.adapters[name] += delta
	if s.adapters[name] == 0 {
		delete(s.adapters, name)
	}
}

// runningAdapters returns the adapters in use, sorted.
func (s *Server) runningAdapters() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := make([]string, 0, len(s.adapters))
	for name := range s.adapters {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func hex(x uint64) string {
	const digits = "0123456789abcdef"
	var b [16]byte
	for i := range b {
		b[15-i] = digits[x&15]
		x >>= 4
	}
	return string(b[:])
}
