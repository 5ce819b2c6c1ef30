package tokenize

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"time"
)

// Mode says where token ids come from.
type Mode string

// The modes of Options.
const (
	// ModeAuto is local where the ids can be known locally, else remote where a Remote is given, else off.
	ModeAuto Mode = "auto"
	// ModeLocal tokenizes in the gateway alone. What cannot be known locally is routed by load.
	ModeLocal Mode = "local"
	// ModeRemote asks a replica's /tokenize for every prompt.
	ModeRemote Mode = "remote"
	// ModeOff tokenizes nothing: every request is routed by load.
	ModeOff Mode = "off"
)

// Encoder names an encoder to prefer.
type Encoder string

// The encoders of Options.
const (
	// EncoderAuto is fastokens where it agrees with HuggingFace's encoder on a built-in corpus, else HuggingFace's.
	EncoderAuto Encoder = "auto"
	// EncoderHuggingFace is the reference, HuggingFace's encoder.
	EncoderHuggingFace Encoder = "huggingface"
)

// Defaults of Options.
const (
	DefaultTimeout            = 100 * time.Millisecond
	DefaultCacheBytes   int64 = 256 << 20
	DefaultRemote             = 200 * time.Millisecond
	DefaultRemoteCache  int64 = 64 << 20
	DefaultHubTimeout         = 5 * time.Minute
	minCacheBytes       int64 = 1 << 20
	defaultRemoteInPar        = 16
	maxWorkers                = 256
	maxRemoteConcurrent       = 4096
)

// Remote asks a replica for token ids. It is implemented by the gateway.
type Remote interface {
	// Tokenize posts body, a JSON object as the engine's /tokenize takes it, to a replica of the model and returns the ids
	// of the answer. It returns soon after ctx is done. Its errors never quote body. It is called concurrently.
	Tokenize(ctx context.Context, body []byte) ([]uint32, error)
}

// Options says which tokenizer and chat template a model has and what they may cost. The zero value is valid but for Model.
type Options struct {
	// Model is where the tokenizer is: a folder that holds tokenizer.json, tokenizer_config.json and the chat template; a
	// tokenizer.json; or a name on the hub, such as Qwen/Qwen3-8B, which is fetched once. Required unless Mode is remote or off.
	Model string `yaml:"model"`
	// Revision is the branch, tag or commit on the hub. Default main.
	Revision string `yaml:"revision"`
	// ChatTemplate is a file that replaces the model's own chat template, as the engine's --chat-template does. Default none.
	ChatTemplate string `yaml:"chat_template"`
	// ContentFormat is how the template wants a message's content, as the engine's --chat-template-content-format: auto, string
	// or openai. Default auto, which reads it from the template as the engine does.
	ContentFormat string `yaml:"chat_template_content_format"`
	// DefaultChatTemplateKwargs are arguments of the chat template that a request's chat_template_kwargs override, as for the
	// engine's --default-chat-template-kwargs. Default none.
	DefaultChatTemplateKwargs map[string]any `yaml:"default_chat_template_kwargs"`
	// ExcludeToolsWhenToolChoiceNone hides the tools of a request whose tool_choice is none from the template, as the engine's
	// --exclude-tools-when-tool-choice-none does. Default false.
	ExcludeToolsWhenToolChoiceNone bool `yaml:"exclude_tools_when_tool_choice_none"`
	// Mode is where token ids come from: auto, local, remote (the replicas' /tokenize) or off. Default auto.
	Mode Mode `yaml:"mode"`
	// Encoder is auto or huggingface. Default auto: the fast encoder where it is proved equal to HuggingFace's.
	Encoder Encoder `yaml:"encoder"`
	// Timeout bounds the time from a request to its ids, template and waiting included. After it the request is routed by
	// load. Default 100ms.
	Timeout time.Duration `yaml:"timeout"`
	// CacheBytes bounds what encoded chunks cost the process in memory, in bytes, the collector's headroom included. -1
	// switches the cache off. Default 256 MiB.
	CacheBytes int64 `yaml:"cache_bytes"`
	// Workers is the number of threads that encode new text. Each keeps caches of its own of up to about 100 MiB. Default: the
	// number of processors the gateway may use, at most 8.
	Workers int `yaml:"workers"`
	// RemoteTimeout bounds one call of a replica's /tokenize. Default 200ms.
	RemoteTimeout time.Duration `yaml:"remote_timeout"`
	// RemoteCacheBytes bounds the memory of answers of /tokenize, in bytes. -1 switches that cache off. Default 64 MiB.
	RemoteCacheBytes int64 `yaml:"remote_cache_bytes"`
	// RemoteConcurrency is how many calls of /tokenize may run at a time; what comes beyond is routed by load. Default 16.
	RemoteConcurrency int `yaml:"remote_concurrency"`
	// HubTimeout bounds the download of a model's files. Default 5m.
	HubTimeout time.Duration `yaml:"hub_timeout"`

	// Name is the model's name in metrics and logs: one of the configured names, never a client's. Default: Model.
	Name string `yaml:"-"`
	// Remote asks the replicas. Nil: remote tokenization is not to be had.
	Remote Remote `yaml:"-"`
}

// Validate returns every problem of the options, each with its key relative to them.
func (o *Options) Validate() error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	switch o.Mode {
	case "", ModeAuto, ModeLocal, ModeRemote, ModeOff:
	default:
		add("mode: %q is none of auto, local, remote, off", o.Mode)
	}
	switch o.Encoder {
	case "", EncoderAuto, EncoderHuggingFace:
	default:
		add("encoder: %q is neither auto nor huggingface", o.Encoder)
	}
	switch o.ContentFormat {
	case "", "auto", "string", "openai":
	default:
		add("chat_template_content_format: %q is none of auto, string, openai", o.ContentFormat)
	}
	if _, err := json.Marshal(o.DefaultChatTemplateKwargs); err != nil {
		add("default_chat_template_kwargs: not what JSON can say: %w", err)
	}
	if o.Model == "" && o.Mode != ModeRemote && o.Mode != ModeOff {
		add("model: empty: name a folder, a tokenizer.json or a model on the hub")
	}
	for _, d := range []struct {
		key string
		val time.Duration
	}{{"timeout", o.Timeout}, {"remote_timeout", o.RemoteTimeout}, {"hub_timeout", o.HubTimeout}} {
		if d.val < 0 {
			add("%s: %s is negative: give a positive duration or 0 for the default", d.key, d.val)
		}
	}
	for _, b := range []struct {
		key string
		val int64
	}{{"cache_bytes", o.CacheBytes}, {"remote_cache_bytes", o.RemoteCacheBytes}} {
		if b.val < -1 || b.val > 0 && b.val < minCacheBytes {
			add("%s: %d is not -1 (off), 0 (default) or at least %d", b.key, b.val, minCacheBytes)
		}
	}
	if o.Workers < 0 || o.Workers > maxWorkers {
		add("workers: %d is not between 0 (default) and %d", o.Workers, maxWorkers)
	}
	if o.RemoteConcurrency < 0 || o.RemoteConcurrency > maxRemoteConcurrent {
		add("remote_concurrency: %d is not between 0 (default) and %d", o.RemoteConcurrency, maxRemoteConcurrent)
	}
	return errors.Join(errs...)
}

// withDefaults returns a copy with every default filled in.
func (o Options) withDefaults() Options {
	orDefault(&o.Mode, ModeAuto)
	orDefault(&o.Encoder, EncoderAuto)
	orDefault(&o.ContentFormat, "auto")
	orDefault(&o.Revision, "main")
	orDefault(&o.Timeout, DefaultTimeout)
	orDefault(&o.CacheBytes, DefaultCacheBytes)
	orDefault(&o.Workers, min(runtime.GOMAXPROCS(0), 8))
	orDefault(&o.RemoteTimeout, DefaultRemote)
	orDefault(&o.RemoteCacheBytes, DefaultRemoteCache)
	orDefault(&o.RemoteConcurrency, defaultRemoteInPar)
	orDefault(&o.HubTimeout, DefaultHubTimeout)
	orDefault(&o.Name, o.Model)
	return o
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}
