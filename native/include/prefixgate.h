/* The C interface of native/, less daulet/tokenizers' own (tokenizers.h of that Go module), which the same library holds.
 *
 * Every text comes with its length in bytes; nothing stops at a null byte. No function panics or throws: a panic inside
 * becomes a status or an error text. Error texts are freed with tokenizers_free_string. They are about files given at
 * start-up and never quote a request. Constructors and prefixgate_encode may be called from any number of threads. */
#ifndef PREFIXGATE_H
#define PREFIXGATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An encoder: text to token ids. */
typedef struct prefixgate_encoder prefixgate_encoder;

/* A stretch of a text in bytes, end excluded. Both lie on borders of UTF-8 characters. */
typedef struct {
  size_t start;
  size_t end;
} prefixgate_span;

enum {
  PREFIXGATE_OK = 0,
  PREFIXGATE_BAD_TEXT = 1, /* not UTF-8, or a span off its characters' borders */
  PREFIXGATE_FAILED = 2,   /* the encoder refused the text */
  PREFIXGATE_PANICKED = 3, /* the encoder panicked; it may be used again */
};

/* HuggingFace's encoder, borrowed from daulet/tokenizers' handle, which must outlive the result and which nobody else may
 * use during the call. Switches off its truncation and padding and adds the tokens of extra, a JSON list of
 * {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}, possibly empty. NULL and *error on failure. */
prefixgate_encoder *prefixgate_encoder_hf(void *tokenizer, const uint8_t *extra, size_t extra_len, char **error);

/* fastokens' encoder from the text of a tokenizer.json; extra as above. NULL and *error where it is not supported. */
prefixgate_encoder *prefixgate_encoder_fast(const uint8_t *json, size_t json_len, const uint8_t *extra, size_t extra_len,
                                            char **error);

/* An encoder that panics on every text, to test that panics stop at this border. */
prefixgate_encoder *prefixgate_encoder_panics(void);

/* Frees an encoder that no call uses any more. NULL does nothing. */
void prefixgate_encoder_free(prefixgate_encoder *encoder);

/* Encodes each span of text by itself. counts[i] becomes the number of ids of spans[i]; the ids of all spans, in order, go to
 * dst if they fit into dst_cap. *len is their number. If they do not fit, *spill holds them: hand it to prefixgate_take.
 * add_special asks for what the tokenizer puts around a text (a begin-of-text token, say). */
int32_t prefixgate_encode(const prefixgate_encoder *encoder, const uint8_t *text, size_t text_len, const prefixgate_span *spans,
                          size_t spans_len, bool add_special, size_t *counts, uint32_t *dst, size_t dst_cap, size_t *len,
                          void **spill);

/* Moves ids that did not fit to dst and frees them. A NULL dst only frees. */
void prefixgate_take(void *spill, uint32_t *dst);

/* Gives memory that is free back to the system, where the C library can. Loading leaves a lot of it. */
void prefixgate_trim(void);

#endif
