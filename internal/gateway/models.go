package gateway

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"prefixgate/internal/openai"
	"prefixgate/internal/replica"
)

// listModels answers GET /v1/models: what the healthy replicas serve, each id once, as the first replica that serves it
// describes it, and the aliases of the configuration. The order is that of the replicas.
func (g *Gateway) listModels(w http.ResponseWriter, r *http.Request) {
	models, ok := g.models()
	if !ok {
		g.refuseLocal(w, r, openai.NoReplica(g.retryAfter))
		return
	}
	body := []byte(`{"object":"list","data":[`)
	for i, m := range models {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, m.raw...)
	}
	g.answerLocal(w, r, append(body, `]}`...))
}

// oneModel answers GET /v1/models/{id}. An id may contain slashes.
func (g *Gateway) oneModel(w http.ResponseWriter, r *http.Request) {
	id := strings.TrimPrefix(r.URL.Path, "/v1/models/")
	models, ok := g.models()
	if !ok {
		g.refuseLocal(w, r, openai.NoReplica(g.retryAfter))
		return
	}
	for _, m := range models {
		if m.id == id {
			g.answerLocal(w, r, m.raw)
			return
		}
	}
	g.refuseLocal(w, r, openai.ModelNotFound(id))
}

// listedModel is an entry of /v1/models.
type listedModel struct {
	id  string
	raw []byte
}

// models returns what the healthy replicas serve; false if there is none of these.
func (g *Gateway) models() ([]listedModel, bool) {
	var models []listedModel
	index := map[string]int{}
	healthy := false
	add := func(id string, raw []byte) {
		if _, ok := index[id]; !ok {
			index[id] = len(models)
			models = append(models, listedModel{id, raw})
		}
	}
	for _, s := range g.fleet.AppendSnapshots(nil) {
		if !s.Healthy {
			continue
		}
		healthy = true
		for i := range s.Models {
			add(s.Models[i].ID, describe(&s.Models[i]))
		}
	}
	aliases := make([]string, 0, len(g.tokenizers.aliases))
	for alias := range g.tokenizers.aliases {
		aliases = append(aliases, alias)
	}
	slices.Sort(aliases)
	for _, alias := range aliases {
		if i, ok := index[g.tokenizers.aliases[alias]]; ok {
			add(alias, renamed(models[i].raw, alias))
		}
	}
	return models, healthy
}

// describe returns a model's object as its replica lists it.
func describe(m *replica.Model) []byte {
	if json.Valid(m.Raw) {
		return m.Raw
	}
	return []byte(`{"id":` + string(quote(m.ID)) + `,"object":"model"}`)
}

// renamed returns a copy of a model's object with another id.
func renamed(raw []byte, id string) []byte {
	at, ok := jsonMember(raw, "id")
	if !ok {
		return raw
	}
	out := append([]byte(nil), raw[:at.start]...)
	out = append(out, quote(id)...)
	return append(out, raw[at.end:]...)
}

// answerLocal answers with JSON that the gateway made itself. HEAD gets the header alone.
func (g *Gateway) answerLocal(w http.ResponseWriter, r *http.Request, body []byte) {
	h := w.Header()
	h.Set(requestIDHeader, requestID(r.Header))
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		w.Write(body)
	}
}

// refuseLocal answers with an error where no exchange is kept.
func (g *Gateway) refuseLocal(w http.ResponseWriter, r *http.Request, err error) {
	w.Header().Set(requestIDHeader, requestID(r.Header))
	openai.WriteError(w, err)
}
