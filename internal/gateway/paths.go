package gateway

import (
	"net/url"
	"strings"
)

// pathClass says what is done with a request for a path that has no handler of its own.
type pathClass uint8

const (
	// pathRefused: the gateway knows nothing of the path, or will not have it.
	pathRefused pathClass = iota
	// pathForwarded: an inference endpoint of the engine, sent to a replica unchanged.
	pathForwarded
)

// inferencePaths are the engine's endpoints outside of /v1/ that only read. Others must be allowed by the configuration.
var inferencePaths = map[string]bool{
	"/tokenize": true, "/detokenize": true,
	"/rerank": true, "/v2/rerank": true, "/score": true, "/pooling": true, "/classify": true,
}

// adminWords are the names of the engines' administrative endpoints. A path with one of them as a segment is never
// forwarded, wherever it stands: loading adapters, sleeping, dropping caches, profiling, changing weights.
var adminWords = map[string]bool{
	"load_lora_adapter": true, "unload_lora_adapter": true,
	"sleep": true, "wake_up": true, "is_sleeping": true, "pause": true, "resume": true, "is_paused": true,
	"reset_prefix_cache": true, "reset_mm_cache": true, "reset_encoder_cache": true, "flush_cache": true,
	"collective_rpc": true, "scale_elastic_ep": true, "is_scaling_elastic_ep": true, "abort_requests": true,
	"server_info": true, "get_server_info": true, "start_profile": true, "stop_profile": true,
	"init_weights_update_group": true, "init_weight_transfer_engine": true, "update_weights": true,
	"update_weights_from_disk": true, "update_weights_from_distributed": true, "update_weights_from_tensor": true,
	"get_weights_by_name": true, "get_world_size": true, "release_memory_occupation": true, "resume_memory_occupation": true,
	"set_internal_state": true, "get_internal_state": true, "kv_event_sources": true, "tokenizer_info": true,
	"metrics": true, "docs": true, "redoc": true, "openapi.json": true, "admin": true, "internal": true, "debug": true,
}

// pathPolicy decides about paths. The zero value has the defaults.
type pathPolicy struct {
	// allowed are exact paths that the configuration adds.
	allowed map[string]bool
}

func newPathPolicy(allow []string) pathPolicy {
	p := pathPolicy{allowed: make(map[string]bool, len(allow))}
	for _, path := range allow {
		p.allowed[path] = true
	}
	return p
}

// class decides about a request's path. It looks at the path as it was sent: one that would read differently after
// decoding, cleaning or a change of case is not given the chance.
func (p pathPolicy) class(u *url.URL) pathClass {
	path := u.EscapedPath()
	if p.allowed[path] {
		return pathForwarded
	}
	if !plainPath(path) {
		return pathRefused
	}
	for segment := range strings.SplitSeq(strings.ToLower(path), "/") {
		if adminWords[segment] {
			return pathRefused
		}
	}
	if strings.HasPrefix(path, "/v1/") && len(path) > len("/v1/") || inferencePaths[path] {
		return pathForwarded
	}
	return pathRefused
}

// plainPath says whether a path is made of plain segments: no escapes, no empty or dotted segments, no characters that some
// server might read as a separator or a parameter. It may end with a slash.
func plainPath(path string) bool {
	if path == "" || path[0] != '/' {
		return false
	}
	rest := strings.TrimSuffix(path[1:], "/")
	for segment := range strings.SplitSeq(rest, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return false
		}
		for i := range len(segment) {
			switch c := segment[i]; {
			case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
			case c == '-', c == '_', c == '.', c == '~', c == ':', c == '@', c == '+', c == '=', c == ',':
			default:
				return false
			}
		}
	}
	return true
}
