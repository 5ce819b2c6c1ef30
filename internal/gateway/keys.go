package gateway

import (
	"net/http"

	"prefixgate/internal/openai"
	"prefixgate/internal/route"
)

// policyKeys fills in what only some policies ask of a request.
type policyKeys struct {
	opts route.Options
}

func newPolicyKeys(opts route.Options) policyKeys {
	if opts.Session.Header == "" && opts.Session.Cookie == "" && opts.Session.Field == "" {
		opts.Session.Header = "X-Session-Id"
	}
	if opts.PrefixHash.Tokens == 0 {
		opts.PrefixHash.Tokens = 1024
	}
	if opts.SimHash.Tokens == 0 {
		opts.SimHash.Tokens = 4096
	}
	return policyKeys{opts: opts}
}

// fill sets the keys that the configured policy asks for.
func (k policyKeys) fill(q *route.Request, x *exchange) {
	switch k.opts.Policy {
	case route.Session:
		q.Session = route.HashSession(k.session(x.r, x.body))
	case route.PrefixHash:
		if k.opts.PrefixHash.Characters > 0 || len(x.encoded.Prompts) == 0 {
			q.TextPrefix = route.HashText(firstText(x.req), max(k.opts.PrefixHash.Characters, k.opts.PrefixHash.Tokens))
		} else {
			q.TextPrefix = route.HashTokens(x.encoded.Prompts[0].IDs, k.opts.PrefixHash.Tokens)
		}
	case route.SimHash:
		if len(x.encoded.Prompts) > 0 {
			q.SimHash = route.SimHashOf(x.encoded.Prompts[0].IDs, k.opts.SimHash.Tokens)
		}
	}
}

// session returns the client's session key: from the header, the cookie or the body's field, whichever has one first.
func (k policyKeys) session(r *http.Request, body []byte) string {
	o := &k.opts.Session
	if o.Header != "" {
		if v := r.Header.Get(o.Header); v != "" {
			return v
		}
	}
	if o.Cookie != "" {
		if c, err := r.Cookie(o.Cookie); err == nil && c.Value != "" {
			return c.Value
		}
	}
	if o.Field != "" {
		if at, ok := jsonMember(body, o.Field); ok {
			v, _ := jsonText(at.of(body))
			return v
		}
	}
	return ""
}

// firstText returns the text of the first user message, or of the first prompt.
func firstText(req *openai.Request) string {
	if req == nil {
		return ""
	}
	for _, p := range req.Prompts {
		return p.Text
	}
	text := ""
	jsonArray(req.Messages, func(at jsonSpan) bool {
		message := at.of(req.Messages)
		role, ok := jsonMember(message, "role")
		if !ok || string(role.of(message)) != `"user"` {
			return true
		}
		content, ok := jsonMember(message, "content")
		if !ok {
			return true
		}
		raw := content.of(message)
		if s, ok := jsonText(raw); ok {
			text = s
			return false
		}
		jsonArray(raw, func(part jsonSpan) bool {
			p := part.of(raw)
			if t, ok := jsonMember(p, "text"); ok {
				s, _ := jsonText(t.of(p))
				text += s
			}
			return true
		})
		return false
	})
	return text
}

// replaceModel returns a copy of body, a JSON object, in which the value of model is name. Nothing else changes. Of a
// doubled key the last is replaced: it is the one that the engine reads.
func replaceModel(body []byte, name string) []byte {
	at, ok := jsonMember(body, "model")
	if !ok {
		return body
	}
	quoted := quote(name)
	out := make([]byte, 0, len(body)+len(quoted))
	out = append(out, body[:at.start]...)
	out = append(out, quoted...)
	return append(out, body[at.end:]...)
}
