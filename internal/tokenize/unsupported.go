package tokenize

import "prefixgate/internal/openai"

// Reason says why a request has no token ids. The set is closed: it is a metric's label.
type Reason string

// The reasons of Unsupported, besides those of openai.Request.LoadOnly, which are passed on as they are.
const (
	// ReasonOff: tokenization is switched off for the model.
	ReasonOff Reason = "off"
	// ReasonClosed: the model was closed meanwhile.
	ReasonClosed Reason = "closed"
	// ReasonTimeout: the ids were not ready within Options.Timeout.
	ReasonTimeout Reason = "timeout"
	// ReasonCanceled: the caller's context ended first.
	ReasonCanceled Reason = "canceled"
	// ReasonNoTemplate: a chat request to a model whose chat template is absent or cannot be known.
	ReasonNoTemplate Reason = "no_template"
	// ReasonRefused: the chat template, or what the engine does before it, refuses the request. The engine answers 400.
	ReasonRefused Reason = "refused"
	// ReasonTemplate: the chat template cannot be rendered here, or not within its bounds.
	ReasonTemplate Reason = "template"
	// ReasonEncoder: the encoder failed.
	ReasonEncoder Reason = "encoder"
	// ReasonText: the text is not UTF-8.
	ReasonText Reason = "text"
	// ReasonTruncate: truncate_prompt_tokens asks for something that depends on the engine.
	ReasonTruncate Reason = "truncate"
	// ReasonRemote: the replica's /tokenize failed.
	ReasonRemote Reason = "remote"
	// ReasonRemoteBusy: too many calls of /tokenize are running.
	ReasonRemoteBusy Reason = "remote_busy"
)

// Unsupported says that the gateway does not know a request's token ids. The request is to be routed by load; the engine
// tells the client what is wrong with it, if anything is.
type Unsupported struct { //nolint:errname // it says what a request is, not what broke
	// Reason is why.
	Reason Reason
	// Err is what was found, for logs at debug level and for people who debug templates; nil if there is no more to say.
	// It may name what a template said, never a prompt's text.
	Err error
}

// Error returns the reason and what is known of it.
func (u *Unsupported) Error() string {
	if u.Err != nil {
		return "no token ids (" + string(u.Reason) + "): " + u.Err.Error()
	}
	return "no token ids (" + string(u.Reason) + ")"
}

// Unwrap returns Err.
func (u *Unsupported) Unwrap() error { return u.Err }

func unsupported(reason Reason, err error) *Unsupported {
	return &Unsupported{Reason: reason, Err: err}
}

func loadOnly(reason openai.Reason) *Unsupported {
	return &Unsupported{Reason: Reason(reason)}
}
